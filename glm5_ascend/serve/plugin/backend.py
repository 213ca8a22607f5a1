"""Attention backend of the sparse MLA cache and of the indexer's key cache, with the metadata of one step.

The layer (`mla.py`) computes attention by `glm5_kernels.ops`. vLLM's `MLAAttention` owns the cache, its spec and the
split kv_b_proj weights; its forward is never called.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NoReturn, TypeVar

import torch
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionMetadata,
    AttentionMetadataBuilder,
    MLAAttentionImpl,
)

from glm5_kernels.ops import PagedBatch

R = TypeVar("R")


@dataclass
class SparseMLAMetadata(AttentionMetadata):  # type: ignore[misc]
    """One step's batch as `glm5_kernels.ops` takes it: B requests, T query tokens."""

    num_actual_tokens: int
    query_start_loc: torch.Tensor  # int32 [B + 1]
    seq_lens: torch.Tensor  # int32 [B]
    block_table: torch.Tensor  # int32 [B, max_blocks]
    slot_mapping: torch.Tensor  # int64 [T]

    _once: dict[Hashable, Any] = field(default_factory=dict)

    @cached_property
    def paged(self) -> PagedBatch:
        return PagedBatch(self.query_start_loc, self.seq_lens, self.block_table)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return int(self.seq_lens.max())

    def once(self, key: Hashable, make: Callable[[], R]) -> R:
        """Result of `make` at the first call in this step with this key."""
        if key not in self._once:
            self._once[key] = make()
        result: R = self._once[key]
        return result

    def angles(self, table: torch.Tensor | None, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos, sin fp32 [T, rope / 2] at these positions of a rotary table; computed once per step.

        Without a table nothing is rotated: rope is 0.
        """
        if table is None:
            return torch.empty(len(positions), 0), torch.empty(len(positions), 0)

        def make() -> tuple[torch.Tensor, torch.Tensor]:
            cos, sin = table[positions].float().chunk(2, dim=-1)
            return cos.contiguous(), sin.contiguous()

        return self.once((table.data_ptr(), positions.numpy().tobytes()), make)

    def all_positions(self, positions: torch.Tensor, columns: int) -> torch.Tensor:
        """int32 [T, columns]: for each token all positions up to its own, then -1; computed once per step."""
        numbers = torch.arange(columns)
        return self.once(
            ("all positions", positions.numpy().tobytes()),
            lambda: torch.where(numbers <= positions[:, None], numbers, -1).int(),
        )


def current_metadata(layer_name: str) -> Any:
    """Metadata of a layer in the running step, or None in vLLM's profiling run."""
    metadata = get_forward_context().attn_metadata
    return metadata[layer_name] if isinstance(metadata, dict) else None


class SparseMLAMetadataBuilder(AttentionMetadataBuilder[SparseMLAMetadata]):  # type: ignore[misc]
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> SparseMLAMetadata:
        m = common_attn_metadata
        return SparseMLAMetadata(
            num_actual_tokens=m.num_actual_tokens,
            query_start_loc=m.query_start_loc[: m.num_reqs + 1],
            seq_lens=m.seq_lens[: m.num_reqs],
            block_table=m.block_table_tensor[: m.num_reqs],
            slot_mapping=m.slot_mapping[: m.num_actual_tokens],
        )


class SparseMLAImpl(MLAAttentionImpl[SparseMLAMetadata]):  # type: ignore[misc]
    """Lets vLLM's `MLAAttention` do no dense prefill, no second absorption and no second cache write."""

    is_sparse = True
    supports_dense_mha_prefill = False
    masked_mha_available = False
    supports_quant_query_input = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        *args: Any,
        topk_indices_buffer: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.topk_indices_buffer = topk_indices_buffer

    def forward_mqa(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError("SparseMLA.attend (glm5_ascend/serve/plugin/mla.py) computes attention")


class SparseMLABackend(AttentionBackend):  # type: ignore[misc]
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "bfloat16", "float16", "float32"]

    @staticmethod
    def get_name() -> str:
        return "GLM5_SPARSE_MLA"

    @staticmethod
    def get_impl_cls() -> type[SparseMLAImpl]:
        return SparseMLAImpl

    @staticmethod
    def get_builder_cls() -> type[SparseMLAMetadataBuilder]:
        return SparseMLAMetadataBuilder

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True


class IndexerBackend(SparseMLABackend):
    """Backend of the indexer's key cache: with a backend of its own it gets its own metadata."""

    @staticmethod
    def get_name() -> str:
        return "GLM5_INDEXER"
