"""vLLM's CPU platform, with a sparse MLA backend and the settings a DSA model needs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from vllm.platforms.cpu import CpuPlatform

from glm5_ascend.errors import ConfigError
from glm5_ascend.serve.cores import BIND, physical_cores
from glm5_ascend.serve.flags import LI_KEY, SFA_KEY
from glm5_ascend.serve.limits import OTHER_RANKS
from glm5_ascend.serve.plugin import sampling, state_copies

if TYPE_CHECKING:
    from vllm.config import VllmConfig

BACKEND_CLASS = "glm5_ascend.serve.plugin.backend.SparseMLABackend"
DEFAULT_BLOCK_SIZE = 64
#: Latents that share a scale in the int8 cache.
TILE = 128


class Glm5CpuPlatform(CpuPlatform):  # type: ignore[misc]
    """`CpuPlatform` that also serves models with DeepSeek Sparse Attention. Other models are served as before."""

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        if attn_selector_config.use_sparse:
            return BACKEND_CLASS
        path: str = super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads)
        return path

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        sampling.install()
        use_physical_cores()
        super().register_triton_kernel_overrides()
        from vllm.triton_utils import HAS_TRITON
        from vllm.triton_utils.dispatcher import register_kernels

        if not HAS_TRITON:
            register_kernels(state_copies.kernels())

    @classmethod
    def update_block_size_for_backend(cls, vllm_config: VllmConfig) -> None:
        """Keep the block size of `check_and_update_config`: vLLM 0.33 sets 128 here unless the user gave one.

        Where a layer has a state, a block of the cache holds it or the rows of some tokens: of so many that it is full.
        """
        if not is_dsa(vllm_config):
            super().update_block_size_for_backend(vllm_config)
        elif vllm_config.model_config.is_hybrid:
            from glm5_ascend.serve.plugin.linear_states import fit_blocks

            fit_blocks(vllm_config)

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        if not is_dsa(vllm_config):
            super().check_and_update_config(vllm_config)
            return
        refuse_unsupported(vllm_config)
        scheduler, cache, parallel = vllm_config.scheduler_config, vllm_config.cache_config, vllm_config.parallel_config
        # CpuPlatform forces these four because its own MLA kernel cannot do better; ours can.
        chunked_prefill, max_tokens = scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens
        prefix_caching, executor = cache.enable_prefix_caching, parallel.distributed_executor_backend
        block_size = cache.block_size if cache.user_specified_block_size else DEFAULT_BLOCK_SIZE
        os.environ["VLLM_SSM_CONV_STATE_LAYOUT"] = "SD"  # a row per token
        super().check_and_update_config(vllm_config)
        scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens = chunked_prefill, max_tokens
        cache.enable_prefix_caching, cache.block_size = prefix_caching, block_size
        # CpuPlatform moves a single worker to another process to bind its threads. The process adds communication to
        # every step, and `use_physical_cores` binds them here.
        if executor == "uni" and os.environ.get(BIND, "") in ("", "nobind"):
            parallel.distributed_executor_backend = executor

        from vllm.config import CompilationMode

        # The layer reads the forward context: nothing to gain from tracing.
        vllm_config.compilation_config.mode = CompilationMode.NONE
        vllm_config.kernel_config.enable_jit_warmup = False  # of kernels for GPUs


def use_physical_cores() -> None:
    """Bind this process, and the threads it starts, to one logical CPU of each physical core, with a thread for each.

    Not where the user has chosen CPUs, or another number of threads.
    """
    cores = physical_cores()
    more = torch.get_num_threads() - len(cores)
    if os.environ.get(BIND, "") or more < 0 or (more and "OMP_NUM_THREADS" in os.environ):
        return
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    if more:
        torch.set_num_threads(len(cores))


def is_dsa(vllm_config: VllmConfig) -> bool:
    """True for a model with DeepSeek Sparse Attention, except DeepSeek-V4: vLLM has a CPU path for it."""
    model = vllm_config.model_config
    text = getattr(model, "hf_text_config", None)
    return hasattr(text, "index_topk") and getattr(text, "model_type", "") != "deepseek_v4"


def refuse_unsupported(vllm_config: VllmConfig) -> None:
    """Raise `ConfigError` for settings that give wrong numbers or are not implemented."""
    parallel = vllm_config.parallel_config
    others = parallel.data_parallel_size, parallel.pipeline_parallel_size, parallel.decode_context_parallel_size
    if others != (1, 1, 1) or parallel.prefill_context_parallel_size != 1 or parallel.enable_expert_parallel:
        raise ConfigError("data, pipeline, context and expert parallel are not implemented for the CPU", OTHER_RANKS)
    int8_caches(vllm_config)
    if vllm_config.cache_config.cache_dtype not in ("auto", "bfloat16", "float16", "float32"):
        raise ConfigError(
            f"kv cache dtype {vllm_config.cache_config.cache_dtype!r} is not implemented for the CPU",
            "drop --kv-cache-dtype; --additional-config makes caches int8 (glm5_ascend/serve/README.md)",
        )


class Int8Caches(NamedTuple):
    """Which caches have int8 rows."""

    indexer: bool
    latents: bool


def int8_caches(vllm_config: VllmConfig) -> Int8Caches:
    """Read vllm-ascend's switches for int8 caches from `additional_config`.

    Raises:
        ConfigError: a switch is no boolean, or the model's sizes do not fit the int8 layout.
    """
    values: dict[str, Any] = vllm_config.additional_config or {}
    for name in (LI_KEY, SFA_KEY):
        if not isinstance(values.get(name, False), bool):
            raise ConfigError(f"additional_config {name} is {values[name]!r}", "use true or false")
    enabled = Int8Caches(values.get(LI_KEY, False), values.get(SFA_KEY, False))
    config = vllm_config.model_config.hf_text_config
    if any(enabled) and vllm_config.model_config.is_hybrid:
        raise ConfigError(f"{LI_KEY} and {SFA_KEY} are not implemented for pooled keys", "drop both keys")
    if enabled.latents and config.kv_lora_rank % TILE:
        raise ConfigError(f"{SFA_KEY}: kv_lora_rank is {config.kv_lora_rank}, not a multiple of {TILE}", "drop the key")
    if enabled.indexer and config.index_head_dim & (config.index_head_dim - 1):
        raise ConfigError(f"{LI_KEY}: index_head_dim is {config.index_head_dim}, not a power of 2", "drop the key")
    return enabled
