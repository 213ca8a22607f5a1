"""The ops of attention in C++ (csrc/attention.cpp)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from glm5_kernels import indexer_pool as pool_reference
from glm5_kernels import indexer_preprocess as indexer_reference
from glm5_kernels import kda as kda_reference
from glm5_kernels import mla_preprocess as mla_reference
from glm5_kernels import sparse_flash_attention as attention_reference
from glm5_kernels.indexer_pool import IndexerPool
from glm5_kernels.indexer_preprocess import IndexerPreprocess
from glm5_kernels.kda import Kda
from glm5_kernels.lightning_indexer import LightningIndexer, LightningIndexerQuant, expanded
from glm5_kernels.mla_preprocess import MlaPreprocess
from glm5_kernels.native.floats import per_head
from glm5_kernels.native.library import function
from glm5_kernels.native.products import apply_linear
from glm5_kernels.native.rows import (
    ANGLES,
    DTYPES,
    FLOATS,
    LANES,
    QUERIES,
    ROWS,
    angles,
    as_angles,
    as_int32,
    as_rows,
    as_vector,
    matrix,
    rows,
)
from glm5_kernels.paged_cache import query_layout
from glm5_kernels.sparse_flash_attention import SparseFlashAttention, SparseFlashAttentionQuant, unpack_latents


def lightning_indexer(operands: LightningIndexer) -> torch.Tensor:
    return expanded(operands, _select(operands, operands.weights.float(), None, operands.pool))


def lightning_indexer_quant(operands: LightningIndexerQuant) -> torch.Tensor:
    """The scales of queries are positive, so they may multiply the weights."""
    return _select(operands, operands.weights.float() * operands.q_scale.float(), operands.k_scale_cache.float())


def _select(
    operands: LightningIndexer | LightningIndexerQuant,
    weights: torch.Tensor,
    k_scale: torch.Tensor | None,
    pool: int = 1,
) -> torch.Tensor:
    q, k_cache = (as_rows(x, dtypes=tuple(DTYPES)) for x in (operands.q, operands.k_cache))
    (tokens, heads, dims), batch, topk = q.shape, operands.batch, operands.topk // pool
    visible, out = query_layout(batch, tokens)[1] // pool, torch.empty(tokens, topk, dtype=torch.int32)
    starts, block_table = batch.query_start_loc.long().contiguous(), as_int32(batch.block_table)
    weights, k_scale = weights.contiguous(), None if k_scale is None else k_scale.contiguous()
    function("lightning_indexer", 2 * ROWS + "ppppp" + "iiiiii" + "p")(
        *rows(q), *rows(k_cache), weights.data_ptr(), 0 if k_scale is None else k_scale.data_ptr(),
        starts.data_ptr(), visible.data_ptr(), block_table.data_ptr(),
        *block_table.shape, k_cache.shape[1], heads, dims, topk, out.data_ptr(),
    )  # fmt: skip
    return out


def sparse_flash_attention(operands: SparseFlashAttention) -> tuple[torch.Tensor, torch.Tensor]:
    ckv, kpe = as_rows(operands.ckv_cache, 2 * LANES), as_rows(operands.kpe_cache)
    if ckv.dtype != kpe.dtype:
        ckv, kpe = ckv.float(), kpe.float()
    return _attend(operands, ckv, kpe, attention_reference.sparse_flash_attention)


def sparse_flash_attention_quant(operands: SparseFlashAttentionQuant) -> tuple[torch.Tensor, torch.Tensor]:
    ql_nope, q_pe, kv_cache, topk_indices, batch, scale, round_probs = operands
    rank, rope = ql_nope.shape[2], q_pe.shape[2]
    if rope % LANES:
        ckv, kpe = unpack_latents(kv_cache, rank, rope)
        unpacked = SparseFlashAttention(ql_nope, q_pe, ckv, kpe, topk_indices, batch, scale, round_probs)
        return sparse_flash_attention(unpacked)
    kv_cache = kv_cache if kv_cache.stride(-1) == 1 else kv_cache.contiguous()
    return _attend(operands, kv_cache, kv_cache[..., rank:], attention_reference.sparse_flash_attention_quant)


def _attend(
    operands: SparseFlashAttention | SparseFlashAttentionQuant,
    ckv: torch.Tensor,
    kpe: torch.Tensor,
    by_reference: Callable[[Any], tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over rows of latents and rotated keys of one dtype; int8: both are in the same packed rows."""
    ql_nope, q_pe, *_, topk_indices, batch, scale, round_probs = operands
    (tokens, heads, rank), dtype = ql_nope.shape, ql_nope.dtype
    nope, pe = as_rows(ql_nope, 2 * LANES), as_rows(q_pe)
    request, visible = query_layout(batch, tokens)
    indices, block_table = as_int32(topk_indices), as_int32(batch.block_table)
    padded, lse = torch.empty(nope.shape, dtype=nope.dtype), torch.empty(tokens, heads)
    function("sparse_flash_attention", 4 * ROWS + "pppp" + "iiiiiii" + "di" + ROWS + "p")(
        *rows(nope), *rows(pe), *rows(ckv), *rows(kpe),
        indices.data_ptr(), request.data_ptr(), visible.data_ptr(), block_table.data_ptr(),
        *nope.shape, pe.shape[2], indices.shape[1], block_table.shape[1], ckv.shape[1],
        scale, round_probs and dtype == torch.bfloat16, *rows(padded), lse.data_ptr(),
    )  # fmt: skip
    out = (padded if nope.shape[2] == rank else padded[..., :rank].contiguous()).to(dtype)
    if np.isnan(lse.numpy()).any():  # an online softmax makes NaN of inf - inf
        repaired, expected = lse.isnan().any(dim=1), by_reference(operands)
        out[repaired], lse[repaired] = expected[0][repaired], expected[1][repaired]
    return out, lse


def mla_preprocess(operands: MlaPreprocess) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers differ from the reference only by the order in which the squares of a row are added."""
    hidden_states, cos, sin, qkv_a, q_b, w_uk_t, q_a_gamma, kv_a_gamma, slot_mapping, ckv_cache, kpe_cache, eps = (
        operands
    )
    dtype, q_lora, (heads, nope, rank), rope = hidden_states.dtype, len(q_a_gamma), w_uk_t.shape, kpe_cache.shape[2]
    plain_caches = all(cache.dtype == dtype and cache.stride(2) == 1 for cache in (ckv_cache, kpe_cache))
    if not plain_caches or dtype not in FLOATS or any(size % LANES for size in (q_lora, nope, rank, rope)):
        return mla_reference.mla_preprocess(operands)
    tokens, slots, (cos, sin) = len(hidden_states), slot_mapping.long().contiguous(), as_angles(cos, sin)
    q_gamma, kv_gamma = as_vector(q_a_gamma), as_vector(kv_a_gamma)
    y = apply_linear(hidden_states, qkv_a, dtype).contiguous()
    q_c, rounded = torch.empty(tokens, q_lora), torch.empty(tokens, q_lora, dtype=dtype)
    function("mla_latents", 3 * ROWS + "d" + ANGLES + "p" + 4 * ROWS + "iiii")(
        *matrix(y), *matrix(q_gamma), *matrix(kv_gamma), eps, *angles(cos, sin), slots.data_ptr(),
        *rows(ckv_cache), *rows(kpe_cache), *matrix(q_c), *matrix(rounded), tokens, q_lora, rank, kpe_cache.shape[1],
    )  # fmt: skip
    z = apply_linear(q_c if q_b.scale is not None else rounded, q_b, dtype).contiguous()
    z = z.view(tokens, heads, nope + rope)
    q_pe = torch.empty(tokens, heads, rope, dtype=dtype)
    function("rotate_queries", QUERIES)(*rows(z[..., nope:]), *rows(q_pe), *angles(cos, sin), True, tokens, heads, rope)
    return per_head(z[..., :nope], w_uk_t), q_pe, rounded


def indexer_preprocess(operands: IndexerPreprocess) -> torch.Tensor:
    q, k, norm_weight, norm_bias, eps, cos, sin, interleaved, slot_mapping, k_cache = operands
    (tokens, heads, dim), contiguous = q.shape, all(x.stride(-1) == 1 for x in (q, k, k_cache))
    if q.dtype not in FLOATS or k_cache.dtype != q.dtype or not contiguous or dim % LANES:
        return indexer_reference.indexer_preprocess(operands)
    out, slots, (cos, sin) = q.new_empty(q.shape), slot_mapping.long().contiguous(), as_angles(cos, sin)
    weight, bias = as_vector(norm_weight), as_vector(norm_bias)
    function("indexer_preprocess", QUERIES + 4 * ROWS + "dpi")(
        *rows(q), *rows(out), *angles(cos, sin), interleaved, tokens, heads, dim,
        *matrix(k), *rows(k_cache), *matrix(weight), *matrix(bias), eps, slots.data_ptr(), k_cache.shape[1],
    )  # fmt: skip
    return out


def indexer_pool(operands: IndexerPool) -> None:
    k, gate, ape, batch, tail_blocks, tail_cache, pool_cache = operands
    plain_caches = tail_cache.stride(-1) == pool_cache.stride(-1) == 1 and pool_cache.dtype in FLOATS
    if not plain_caches or k.dtype not in FLOATS or k.shape[1] % LANES:
        return pool_reference.indexer_pool(operands)
    k, gate, ape = as_rows(k), as_rows(gate), ape.float().contiguous()
    starts, (request, visible) = batch.query_start_loc.long().contiguous(), query_layout(batch, len(k))
    block_table, rings = as_int32(batch.block_table), as_int32(tail_blocks)
    function("indexer_pool", 2 * ROWS + "p" + 3 * ROWS + "ppppp" + "iiiiii")(
        *matrix(k), *matrix(gate), ape.data_ptr(), *rows(tail_cache[:, 0]), *rows(tail_cache[:, 1]),
        *rows(pool_cache), starts.data_ptr(), request.data_ptr(), visible.data_ptr(), block_table.data_ptr(),
        rings.data_ptr(), len(k), block_table.shape[1], pool_cache.shape[1], k.shape[1], len(ape), tail_cache.shape[2],
    )  # fmt: skip
    return None


def kda(operands: Kda) -> torch.Tensor:
    q, k, v, g, beta, states, query_start_loc, initial_slots, state_slots = operands
    heads, keys, values = states.shape[1:]
    dense = states.stride()[1:] == (keys * values, values, 1)
    if not dense or q.dtype not in FLOATS or keys % LANES or values % LANES:
        return kda_reference.kda(operands)
    q, k, v, g = map(as_rows, (q, k, v, g))
    tables = [as_int32(x) for x in (query_start_loc, initial_slots, state_slots)]
    beta, out = beta.contiguous(), q.new_empty(v.shape)
    function("kda", 5 * ROWS + "ppi" + "ppp" + "iiii")(
        *rows(q), *rows(k), *rows(v), *rows(g), *rows(out), beta.data_ptr(), states.data_ptr(), states.stride(0),
        *(table.data_ptr() for table in tables), len(initial_slots), heads, keys, values,
    )  # fmt: skip
    return out
