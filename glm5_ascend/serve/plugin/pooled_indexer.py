"""The indexer of GLM-5.3-Flash in one layer: pool this step's keys by four, choose pools, and the tokens behind them.

vLLM's module keeps the weights. A pool that is not complete yet lies in a ring of its request's last tokens, so a
prompt may be split anywhere and drafts be rejected: positions say where a key belongs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.nn.functional import layer_norm, linear
from vllm.config import get_current_vllm_config
from vllm.v1.kv_cache_layout import KVCacheLayout

from glm5_ascend.serve.plugin.backend import SparseMLABackend, SparseMLAMetadata, current_metadata
from glm5_ascend.serve.plugin.caches import IndexerCache
from glm5_ascend.serve.plugin.compat import KEEP_WEIGHT, change_class
from glm5_ascend.serve.plugin.text_model import attention
from glm5_kernels import ops


class PooledCache(IndexerCache, attention.Glm5NextIndexerCache):  # type: ignore[misc]
    """Key cache [num_blocks, block_size / index_kpool, index_head_dim] in the model's dtype."""


class TailBackend(SparseMLABackend):
    """Backend of the rings, with metadata of its own: another table of blocks."""

    @staticmethod
    def get_name() -> str:
        return "GLM5_TAIL"

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Block by block: vLLM packs rows of different sizes, and states, into such blocks only."""
        return (KVCacheLayout.BLHNC,)


class TailCache(attention.Glm5NextTailCache):  # type: ignore[misc]
    """Rings [num_blocks, 2, ring, index_head_dim] of keys and gates in the model's dtype."""

    def get_attn_backend(self) -> type[TailBackend]:
        return TailBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        return dataclasses.replace(super().get_kv_cache_spec(vllm_config), dtype=vllm_config.model_config.dtype)


def install_caches(indexer: Any) -> None:
    """Give the indexer caches in the model's dtype."""
    change_class(indexer.k_cache, PooledCache)
    change_class(indexer.tail_cache, TailCache)
    setattr(indexer.wk_weights_proj, KEEP_WEIGHT, True)  # its halves are multiplied one by one
    dtype = get_current_vllm_config().model_config.dtype
    indexer.k_cache.head_dim, indexer.k_cache.dtype = indexer.head_dim, dtype
    indexer.index_kpool_compress_gate.data = indexer.index_kpool_compress_gate.data.to(dtype)


def choose_positions(
    indexer: Any,
    hidden_states: torch.Tensor,
    q_c: torch.Tensor,
    positions: torch.Tensor,
    rotary_emb: Any,
    metadata: SparseMLAMetadata,
) -> torch.Tensor:
    """Positions that each token attends to: int32 [T, index_topk + index_kpool - 1], -1 where there are fewer.

    Args:
        hidden_states: [T, hidden_size], the layer's input. q_c: [T, q_lora_rank], normalised.
        positions: int64 [T]. rotary_emb: not read, these queries and keys are not rotated.
    """
    dim, pool, cache, norm = indexer.head_dim, indexer.index_kpool, indexer.k_cache.kv_cache, indexer.k_norm
    key, scale = indexer.wk_weights_proj.weight.data.split([dim, indexer.n_head])
    k, gate = (
        ops.int8_linear(hidden_states, ops.LinearWeights(weight))
        for weight in (key, indexer.index_kpool_compress_gate.data)
    )
    k = layer_norm(k.float(), (dim,), norm.weight, norm.bias, norm.eps).to(k.dtype)
    tail = current_metadata(indexer.tail_cache.prefix)
    assert tail is not None
    ops.indexer_pool(
        k,
        gate,
        indexer.index_kpool_compress_ape.data,
        metadata.paged,
        tail.block_table[:, 0],
        indexer.tail_cache.kv_cache,
        cache,
    )
    if metadata.longest <= indexer.topk_tokens:
        return metadata.all_positions(positions, indexer.topk_tokens + pool - 1)
    q = indexer.wq_b(q_c)[0].view(-1, indexer.n_head, dim)
    weights = linear(hidden_states.float(), scale.float())  # nearly equal pools are not to change places
    return ops.lightning_indexer(q, cache, weights, metadata.paged, indexer.topk_tokens, pool)
