"""Sparse Flash Attention compiled: selected rows are gathered tile by tile, with an online softmax."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from glm5_kernels.compiled import amx
from glm5_kernels.compiled.amx import AMX, SIDE
from glm5_kernels.compiled.recording import repeated
from glm5_kernels.compiled.rows import PACKED, PAIRED, row_address
from glm5_kernels.compiled.simd import BF16, FEWER, HEADS, PAIRS, STEP, WIDTH
from glm5_kernels.compiled.sparse_flash_attention_amx import attend_by_amx
from glm5_kernels.compiled.sparse_flash_attention_operands import (
    Caches,
    Queries,
    SelectedKeys,
    SoftmaxOptions,
    groups_of,
)
from glm5_kernels.compiled.sparse_flash_attention_tiles import attend_tokens
from glm5_kernels.compiled.threads import count, run_ranges
from glm5_kernels.paged_cache import MAX_POSITIONS, query_layout
from glm5_kernels.sparse_flash_attention import SparseFlashAttention, SparseFlashAttentionQuant, reference
from glm5_kernels.sparse_flash_attention.reference import unpack_latents

_query_layout = repeated(query_layout)


def sparse_flash_attention(operands: SparseFlashAttention) -> tuple[torch.Tensor, torch.Tensor]:
    ckv = _as_rows(operands.ckv_cache, _padded(operands.ckv_cache.shape[-1], STEP))
    kpe = _as_rows(operands.kpe_cache, _padded(operands.kpe_cache.shape[-1], WIDTH))
    if ckv.dtype != kpe.dtype:
        ckv, kpe = ckv.float(), kpe.float()
    caches = Caches(row_address(ckv), row_address(kpe), ckv.shape[1], ckv.shape[2], kpe.shape[2])
    out, lse = _attend(operands, caches)
    _repair_non_finite(out, lse, partial(reference.sparse_flash_attention, operands))
    return out, lse


def sparse_flash_attention_quant(operands: SparseFlashAttentionQuant) -> tuple[torch.Tensor, torch.Tensor]:
    ql_nope, q_pe, kv_cache, topk_indices, batch, scale, round_probs = operands
    rank, rope = ql_nope.shape[2], q_pe.shape[2]
    if kv_cache.stride(-1) != 1 or rope % WIDTH:
        ckv, kpe = unpack_latents(kv_cache, rank, rope)
        unpacked = SparseFlashAttention(ql_nope, q_pe, ckv, kpe, topk_indices, batch, scale, round_probs)
        return sparse_flash_attention(unpacked)
    latents, rotated = row_address(kv_cache, PACKED), row_address(kv_cache[..., rank:], PACKED)
    out, lse = _attend(operands, Caches(latents, rotated, kv_cache.shape[1], rank, rope))
    _repair_non_finite(out, lse, partial(reference.sparse_flash_attention_quant, operands))
    return out, lse


@repeated
def _repair_non_finite(
    out: torch.Tensor, lse: torch.Tensor, by_reference: Callable[[], tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """Replace tokens with non-finite scores by the reference's result: an online softmax makes NaN of inf - inf."""
    if np.isnan(lse.numpy()).any():
        tokens, expected = lse.isnan().any(dim=1), by_reference()
        out[tokens], lse[tokens] = expected[0][tokens], expected[1][tokens]


def _attend(
    operands: SparseFlashAttention | SparseFlashAttentionQuant, caches: Caches
) -> tuple[torch.Tensor, torch.Tensor]:
    ql_nope, q_pe, *_, topk_indices, batch, scale, round_probs = operands
    (tokens, heads, rank), dtype = ql_nope.shape, ql_nope.dtype
    request, visible = _query_layout(batch, tokens)
    nope, pe = _as_rows(ql_nope, caches.rank), _as_rows(q_pe, caches.rope)
    queries = Queries(row_address(nope), row_address(pe), heads)
    indices, block_table = _int32(topk_indices), _int32(batch.block_table)
    selection = SelectedKeys(indices.numpy(), visible.numpy(), request.numpy(), block_table.numpy())
    softmax = SoftmaxOptions(float(scale), int(round_probs and dtype == torch.bfloat16))
    latents, lse = torch.empty(tokens, heads, caches.rank, dtype=nope.dtype), torch.empty(tokens, heads)
    out, sums = row_address(latents), lse.numpy()
    bf16_queries = queries.nope.kind == queries.pe.kind == BF16
    all_bf16 = bf16_queries and caches.ckv.kind == caches.kpe.kind == BF16
    by_amx = AMX and (all_bf16 or (bf16_queries and caches.ckv.kind == PACKED)) and heads > FEWER
    by_amx &= amx.fits(caches.rank, caches.rope)
    if PAIRS and all_bf16 and not any(size % (2 * WIDTH) for size in (caches.rank, caches.rope)):
        caches = caches._replace(ckv=caches.ckv._replace(kind=PAIRED), kpe=caches.kpe._replace(kind=PAIRED))
    kernel, unit = (attend_by_amx, SIDE) if by_amx else (attend_tokens, HEADS)
    groups = groups_of(heads, tokens, count(), unit)
    run_ranges(kernel, tokens * groups.per_token, 1, queries, caches, selection, softmax, groups, out, sums)
    return latents[..., :rank].to(dtype).contiguous(), lse


def _int32(x: torch.Tensor) -> torch.Tensor:
    """x as int32; larger values become one beyond every cache, smaller ones -1."""
    return (x if x.dtype == torch.int32 else x.long().clamp(-1, MAX_POSITIONS).int()).contiguous()


def _as_rows(x: torch.Tensor, size: int) -> torch.Tensor:
    """x itself if its rows are bf16 or fp32 of this size, else an fp32 copy padded with zeros."""
    if x.dtype in (torch.bfloat16, torch.float32) and x.stride(-1) == 1 and x.shape[-1] == size:
        return x
    return F.pad(x.float(), (0, size - x.shape[-1])).contiguous()


def _padded(size: int, step: int) -> int:
    return -(-size // step) * step
