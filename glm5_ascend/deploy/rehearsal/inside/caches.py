"""Size of a rank's caches by vllm-ascend's specification, and the number of blocks that vLLM allocates."""

from __future__ import annotations

import types
from typing import Any

import torch
from vllm.config import VllmConfig

from .meta import BigOnMeta


def share(config: VllmConfig, target: Any, draft: torch.nn.Module) -> None:
    """Share embedding, head and top-k indices of the target with the draft, as the code of the proposer decides."""
    from vllm_ascend.spec_decode.eagle_proposer import AscendEagleProposer

    proposer = object.__new__(AscendEagleProposer)
    proposer.model, proposer.vllm_config, proposer.method, proposer.use_compress = draft, config, "mtp", False
    proposer.use_cuda_graph = False  # a graph needs a device
    target = target.get_language_model() if hasattr(target, "get_language_model") else target
    with BigOnMeta():
        proposer._maybe_share_embeddings(target)
        proposer._maybe_share_lm_head(target)
        proposer._maybe_share_topk_indices(target)


def cache_specs(config: VllmConfig) -> dict[str, Any]:
    """Cache specifications of the built layers by NPUModelRunner.get_kv_cache_spec, without its constructor."""
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
    from vllm_ascend.ascend_config import get_ascend_config
    from vllm_ascend.utils import enable_sfa_dcp_replicated_indexer
    from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

    hf = config.model_config.hf_text_config
    replicated = config.parallel_config.decode_context_parallel_size if enable_sfa_dcp_replicated_indexer() else 1
    runner = types.SimpleNamespace(
        vllm_config=config,
        ascend_config=get_ascend_config(),
        model_config=config.model_config,
        use_compress=False,
        use_sparse=True,
        sparse_head_dim=(hf.kv_lora_rank, hf.qk_rope_head_dim, hf.index_head_dim),
        kv_cache_dtype=kv_cache_dtype_str_to_dtype(config.cache_config.cache_dtype, config.model_config),
        dtype=config.model_config.dtype,
        c8_cache_dtype=torch.int8,
        c8_k_cache_dtype=torch.int8,
        c8_k_scale_cache_dtype=torch.float16,
        block_size=config.cache_config.block_size,
        sfa_dcp_replicated_indexer_size=replicated,
        shared_kv_cache_layers={},
        sparse_kv_offload_enabled=False,
    )
    specs: dict[str, Any] = NPUModelRunner.get_kv_cache_spec(runner)
    return specs


def cache(config: VllmConfig, available: int | None) -> tuple[dict[str, Any], list[str]]:
    """Bytes per token of one die and blocks for `available` bytes (None: no blocks are counted), and the problems."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

    specs = cache_specs(config)
    tokens = config.cache_config.block_size * config.parallel_config.decode_context_parallel_size
    block, per_request = sizes(config, specs)
    report: dict[str, Any] = {
        "bytes_per_token": block / tokens, "request_bytes": per_request, "tokens_per_block": tokens
    }  # fmt: skip
    problems = [
        f"int8 {name} are requested, but no layer has them: this version reads other switches or marks"
        for name in ignored(config, specs)
    ]
    if available is not None and specs:
        resolve_layout(config, specs)
        try:
            (groups,) = get_kv_cache_configs(config, [specs], [available])
            report["blocks"] = groups.num_blocks
        except ValueError as error:  # one longest request does not fit
            problems.append(str(error)[:300])
    return report, problems


def sizes(config: VllmConfig, specs: dict[str, Any]) -> tuple[int, int]:
    """Bytes of a block in all layers, and of what a request holds whatever its length (states of linear attention)."""
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_interface import MambaSpec

    if not any(isinstance(spec, MambaSpec) for spec in specs.values()):
        return sum(spec.page_size_bytes for spec in specs.values()), 0
    # The first group has the pages that grow; blocks of all groups come from one pool.
    groups = kv_cache_utils.get_kv_cache_groups(config, specs)
    block = kv_cache_utils._pool_bytes_per_block(groups)
    fixed = [group.kv_cache_spec for group in groups[1:]]
    return block, sum(-(-spec.max_memory_usage_bytes(config) // spec.page_size_bytes) for spec in fixed) * block


def ignored(config: VllmConfig, specs: dict[str, Any]) -> list[str]:
    """Requested int8 caches, by a key or a flag, that no layer has."""
    keys, flags = config.additional_config or {}, getattr(config.attention_config, "indexer_kv_dtype", "")
    latents = keys.get("enable_sparse_sfa_c8") or config.cache_config.cache_dtype == "int8"
    indexer = keys.get("enable_sparse_li_c8") or flags == "int8"
    rows = ("latents", "cache_sparse_sfa_c8", latents), ("indexer keys", "cache_sparse_li_c8", indexer)
    return [name for name, mark, asked in rows if asked and not any(getattr(s, mark, False) for s in specs.values())]


def resolve_layout(config: VllmConfig, specs: dict[str, Any]) -> None:
    """Resolve the layout of caches as the engine core does, if this vLLM has several layouts."""
    from vllm.v1.attention.backends import utils
    from vllm.v1.worker import worker_base

    if hasattr(utils, "resolve_kv_cache_layout"):
        layouts = utils.get_supported_kv_cache_layouts(worker_base.get_current_attn_backends(config))
        utils.resolve_kv_cache_layout(config, [[layout.name for layout in layouts]], list(specs.values()))
