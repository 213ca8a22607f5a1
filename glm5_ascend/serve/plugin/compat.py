"""Differences between vLLM 0.32, 0.29 (both served in tests) and 0.23 (its Python alone), and what has no hook in vLLM.

Each entry says when it can be removed.
"""

from __future__ import annotations

from typing import Any

import vllm.v1.attention.backend as backend

# vLLM 0.23 has a base class for sparse implementations; 0.29 dropped it.
# Remove when the oldest supported vLLM is newer than 0.23.
SparseMLAImplBase = getattr(backend, "SparseMLAAttentionImpl", backend.MLAAttentionImpl)


def cache_shape(
    num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
) -> tuple[int, ...]:
    """Shape of a cache, which vLLM 0.23 asks the backend for and 0.32 the spec. Remove with 0.23."""
    return (num_blocks, block_size, head_size)


def install(layer: Any, subclass: type) -> None:
    """Turn a module that vLLM has built and registered by name into `subclass`, a subclass of its class.

    vLLM 0.23 to 0.32 build `MLAAttention` and the indexer's cache inside constructors, without the registry that the
    MLA wrapper has. Remove when `PluggableLayer` covers both.
    """
    layer.__class__ = subclass


def mla_modules(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The `mla_modules` argument of vLLM's MLA wrapper: its ninth positional parameter after self.

    The order is hidden_size, num_heads, scale, qk_nope_head_dim, qk_rope_head_dim, v_head_dim, q_lora_rank,
    kv_lora_rank, mla_modules. Remove when every supported vLLM passes them by name.
    """
    return kwargs["mla_modules"] if "mla_modules" in kwargs else args[8]


class NoPrefill:
    """Replaces the dense prefill that vLLM 0.23 builds for every MLA layer, sparse or not; it is never called."""

    def __init__(self, **sizes: Any) -> None:
        pass

    @staticmethod
    def get_name() -> str:
        return "GLM5_NONE"

    def prepare_metadata(self, metadata: Any) -> None:
        """Do nothing: our layers do their own attention."""


def register() -> None:
    """Replace vLLM 0.23's default dense prefill, which needs a GPU. Newer versions build none. Remove with 0.23."""
    if not hasattr(backend, "SparseMLAAttentionImpl"):
        return
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum, register_mla_prefill_backend

    register_mla_prefill_backend(MLAPrefillBackendEnum.FLASH_ATTN, f"{__name__}.{NoPrefill.__name__}")
