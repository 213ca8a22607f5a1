"""Differences between the vLLM versions this plugin has met: 0.32 and 0.29 (served in tests), 0.23 (its Python alone).

Each entry says when it can go.
"""

from __future__ import annotations

from typing import Any

import vllm.v1.attention.backend as backend

# vLLM 0.23 wants sparse implementations to derive from a class of their own; 0.29 dropped it.
# Remove when the oldest supported vLLM is newer than 0.23.
SparseMLAImplBase = getattr(backend, "SparseMLAAttentionImpl", backend.MLAAttentionImpl)


def cache_shape(
    num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
) -> tuple[int, ...]:
    """vLLM 0.23 asks the backend for the shape of a cache, 0.32 its spec. Remove with 0.23."""
    return (num_blocks, block_size, head_size)


def mla_modules(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The `mla_modules` of a call of vLLM's MLA wrapper, whose ninth positional parameter (after self) they are.

    The order is hidden_size, num_heads, scale, qk_nope_head_dim, qk_rope_head_dim, v_head_dim, q_lora_rank,
    kv_lora_rank, mla_modules. Remove when every supported vLLM passes them by name.
    """
    return kwargs["mla_modules"] if "mla_modules" in kwargs else args[8]


class NoPrefill:
    """In the place of the dense prefill that vLLM 0.23 builds for every MLA layer, sparse or not: never called."""

    def __init__(self, **sizes: Any) -> None:
        pass

    @staticmethod
    def get_name() -> str:
        return "GLM5_NONE"

    def prepare_metadata(self, metadata: Any) -> None:
        """Nothing: our layers do their own attention."""


def register() -> None:
    """vLLM 0.23's default dense prefill needs a GPU. Newer ones build none for our backend. Remove with 0.23."""
    if not hasattr(backend, "SparseMLAAttentionImpl"):
        return
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum, register_mla_prefill_backend

    register_mla_prefill_backend(MLAPrefillBackendEnum.FLASH_ATTN, f"{__name__}.{NoPrefill.__name__}")
