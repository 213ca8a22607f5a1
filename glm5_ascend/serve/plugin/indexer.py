"""The lightning indexer of one layer: project, rotate, store this step's keys, choose positions.

vLLM's `Indexer` module keeps the weights, so tensor names are the checkpoint's. Its fp8 cache becomes `IndexerCache`,
and `choose_positions` does the work of its forward, which needs a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.models.deepseek_v2 import Indexer

from glm5_ascend.serve.plugin import caches
from glm5_ascend.serve.plugin.backend import SparseMLAMetadata
from glm5_ascend.serve.plugin.compat import change_class
from glm5_ascend.serve.plugin.platform import int8_caches
from glm5_kernels import ops


def indexer_columns(indexer: Any) -> int:
    """Positions that a token attends to, at most: the tokens behind the last complete pool come on top."""
    columns: int = indexer.topk_tokens + getattr(indexer, "index_kpool", 1) - 1
    return columns


def install_indexer(indexer: Any) -> Callable[..., torch.Tensor]:
    """Give an indexer of any architecture our caches, and return what chooses its positions."""
    if isinstance(indexer, Indexer):
        install_cache(indexer)
        return choose_positions
    from glm5_ascend.serve.plugin import pooled_indexer  # imports vLLM's module of GLM-5.3-Flash

    pooled_indexer.install_caches(indexer)
    return pooled_indexer.choose_positions


def install_cache(indexer: Indexer) -> None:
    """Give the indexer a key cache in the model's dtype or in int8."""
    cache, config = indexer.k_cache, get_current_vllm_config()
    change_class(cache, caches.IndexerCache)
    if int8_caches(config).indexer:
        cache.head_dim, cache.dtype = indexer.head_dim + caches.SCALE_BYTES, torch.int8
    else:
        cache.head_dim, cache.dtype = indexer.head_dim, config.model_config.dtype


def choose_positions(
    indexer: Indexer,
    hidden_states: torch.Tensor,
    q_c: torch.Tensor,
    positions: torch.Tensor,
    rotary_emb: Any,
    metadata: SparseMLAMetadata,
) -> torch.Tensor:
    """Positions that each token attends to: int32 [T, index_topk], -1 where there are fewer.

    Args:
        hidden_states: [T, hidden_size], the layer's input. q_c: [T, q_lora_rank], normalised.
        positions: int64 [T]. rotary_emb: the indexer's own (its pairing may differ from the attention's).
    """
    dim, slots, cache = indexer.head_dim, metadata.slot_mapping, indexer.k_cache.kv_cache
    k, weights = indexer.wk_weights_proj(hidden_states)[0].split([dim, indexer.n_head], dim=-1)
    takes_all = metadata.longest <= indexer.topk_tokens  # no scores, so no queries: a tenth of the attention's weights
    q = k.new_empty(len(k), 0, dim) if takes_all else indexer.wq_b(q_c)[0].view(-1, indexer.n_head, dim)  # [T, H, D]
    norm, angles = indexer.k_norm, metadata.angles(rotary_emb.cos_sin_cache, positions)
    is_int8, rows = cache.dtype == torch.int8, cache
    if is_int8:  # this step's keys in the model's dtype, quantized below
        rows, slots = k.new_empty(1, len(k), dim), torch.arange(len(k))
    # Keys are written before positions are chosen: a token may choose itself.
    q = ops.indexer_preprocess(
        q, k, norm.weight.data, norm.bias.data, norm.eps, *angles, not rotary_emb.is_neox_style, slots, rows
    )
    if is_int8:
        caches.write_keys(cache, metadata.slot_mapping, rows[0])
    if takes_all:
        return metadata.all_positions(positions, indexer.topk_tokens)
    scaled = weights.float() * (dim**-0.5 * indexer.n_head**-0.5)
    if not is_int8:
        return ops.lightning_indexer(q, cache, scaled, metadata.paged, indexer.topk_tokens)
    (queries, q_scale), (keys, k_scale) = ops.quantize_indexer(q), caches.split_keys(cache)
    return ops.lightning_indexer_quant(queries, keys, scaled, q_scale, k_scale, metadata.paged, indexer.topk_tokens)
