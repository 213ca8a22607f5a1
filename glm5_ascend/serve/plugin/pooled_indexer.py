"""The indexer of GLM-5.3-Flash in one layer: pool this step's keys by four, choose pools, and the tokens behind them.

vLLM's module keeps the weights. A block of the cache has, beside the keys of its complete pools, a ring of the last
tokens' keys and gates: the first tokens of a pool wait there for the others, wherever a prompt is split and whichever
drafts are rejected. vLLM has one ring per request, in a group of caches of its own, which its drafts on a CPU refuse.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.nn.functional import layer_norm, linear
from vllm.config import get_current_vllm_config
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache
from vllm.v1.kv_cache_layout import KVCacheLayout

from glm5_ascend.serve.plugin.backend import IndexerBackend, SparseMLAMetadata
from glm5_ascend.serve.plugin.caches import IndexerCache
from glm5_ascend.serve.plugin.compat import KEEP_WEIGHT, change_class
from glm5_ascend.serve.plugin.text_model import attention
from glm5_kernels import ops
from glm5_kernels.ops import PagedBatch


class PooledCache(IndexerCache, attention.Glm5NextIndexerCache):  # type: ignore[misc]
    """Key cache [num_blocks, block_size / index_kpool, index_head_dim] in the model's dtype."""


class RingBackend(IndexerBackend):
    """Backend of the rings."""

    @staticmethod
    def get_name() -> str:
        return "GLM5_POOL_RING"

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Block by block: otherwise vLLM does not take states and rows of different sizes."""
        return (KVCacheLayout.BLHNC,)


class RingCache(attention.Glm5NextTailCache):  # type: ignore[misc]
    """Rings [num_blocks, ring, 2 * index_head_dim] of keys and gates in the model's dtype."""

    def get_attn_backend(self) -> type[RingBackend]:
        return RingBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        spec = DeepseekV32IndexerCache.get_kv_cache_spec(self, vllm_config)
        ring = super().get_kv_cache_spec(vllm_config).block_size  # holds a pool and all drafts
        dtype = vllm_config.model_config.dtype
        return replace(spec, head_size=2 * self.head_dim, dtype=dtype, tokens_per_state=spec.block_size // ring)


class Pooling(NamedTuple):
    """Where the keys of one step's pools come from, and where the tokens of open pools go.

    Attributes:
        batch: the step's requests, each from the start of its open pool.
        lead: (blocks, rows) of the tokens of earlier steps in these pools.
        order: rows of (lead, this step's tokens) in the order of `batch`.
        last: tokens that a later step may need. ring: (blocks, rows) for them.
    """

    batch: PagedBatch
    lead: tuple[torch.Tensor, torch.Tensor]
    order: torch.Tensor
    last: torch.Tensor
    ring: tuple[torch.Tensor, torch.Tensor]

    @classmethod
    def of(cls, batch: PagedBatch, pool: int, block_size: int, ring: int) -> Pooling:
        """Plan a step with pools of `pool` tokens and rings of `ring` in blocks of `block_size`."""
        starts, table = batch.query_start_loc.long(), batch.block_table.long()
        counts = starts.diff()
        first = batch.seq_lens - counts  # position of each request's first token
        lead = first % pool
        requests = torch.arange(len(counts))

        def places(request: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return table[request, position // block_size], position % ring

        lead_of, lead_index = _ragged(requests, lead)
        request, index = _ragged(requests, counts)
        last = torch.where(index >= (counts - ring)[request])[0]
        order = torch.cat(
            [
                lead_index + (starts[:-1] + lead.cumsum(0) - lead)[lead_of],
                index + (starts[:-1] + lead.cumsum(0))[request],
            ]
        ).argsort()
        return cls(
            PagedBatch(
                (starts + torch.nn.functional.pad(lead.cumsum(0), (1, 0))).int(), batch.seq_lens, batch.block_table
            ),
            places(lead_of, (first - lead)[lead_of] + lead_index),
            order,
            last,
            places(request[last], (first[request] + index)[last]),
        )


def _ragged(requests: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Request and index in it of each of `counts` rows."""
    request = torch.repeat_interleave(requests, counts)
    return request, torch.arange(len(request)) - (counts.cumsum(0) - counts)[request]


def install_caches(indexer: Any) -> None:
    """Give the indexer caches in the model's dtype."""
    change_class(indexer.k_cache, PooledCache)
    change_class(indexer.tail_cache, RingCache)
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
    _write_pools(indexer, torch.cat([k, gate], dim=-1), metadata)
    if metadata.longest <= indexer.topk_tokens:
        return metadata.all_positions(positions, indexer.topk_tokens + pool - 1)
    q = indexer.wq_b(q_c)[0].view(-1, indexer.n_head, dim)
    weights = linear(hidden_states.float(), scale.float())  # nearly equal pools are not to change places
    return ops.lightning_indexer(q, cache, weights, metadata.paged, indexer.topk_tokens, pool)


def _write_pools(indexer: Any, rows: torch.Tensor, metadata: SparseMLAMetadata) -> None:
    """Write the keys of the pools that are complete now, and keep the tokens of those that are not.

    Args:
        rows: [T, 2 * index_head_dim], keys and gates of this step.
    """
    cache, rings, pool = indexer.k_cache.kv_cache, indexer.tail_cache.kv_cache, indexer.index_kpool
    plan = metadata.once("pools", lambda: Pooling.of(metadata.paged, pool, cache.shape[1] * pool, rings.shape[1]))
    k, gate = torch.cat([rings[plan.lead], rows])[plan.order].chunk(2, dim=-1)
    requests = torch.arange(len(metadata.seq_lens))
    no_rings = rows.new_empty(len(requests), 2, rings.shape[1], indexer.head_dim)  # nothing is open before these rows
    ops.indexer_pool(k, gate, indexer.index_kpool_compress_ape.data, plan.batch, requests, no_rings, cache)
    rings[plan.ring] = rows[plan.last]
