"""Sparse Flash Attention in C++ (csrc/sparse_flash_attention.h)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from glm5_kernels.native.library import packed
from glm5_kernels.native.rows import LANES, ROWS, as_int32, as_rows, rows
from glm5_kernels.paged_cache import query_layout
from glm5_kernels.sparse_flash_attention import SparseFlashAttention, SparseFlashAttentionQuant, reference
from glm5_kernels.sparse_flash_attention.reference import unpack_latents


class _Cache(NamedTuple):
    """Rows (block, offset) of latents and rotated keys, of one dtype; int8: both in the same packed rows."""

    latents: torch.Tensor
    rotated: torch.Tensor
    rank: int
    rope: int


def sparse_flash_attention(operands: SparseFlashAttention) -> tuple[torch.Tensor, torch.Tensor]:
    ckv, kpe = as_rows(operands.ckv_cache, 2 * LANES), as_rows(operands.kpe_cache)
    if ckv.dtype != kpe.dtype:
        ckv, kpe = ckv.float(), kpe.float()
    out, lse = _attend(operands, _Cache(ckv, kpe, ckv.shape[2], kpe.shape[2]))
    _repair_non_finite(out, lse, partial(reference.sparse_flash_attention, operands))
    return out, lse


def sparse_flash_attention_quant(operands: SparseFlashAttentionQuant) -> tuple[torch.Tensor, torch.Tensor]:
    ql_nope, q_pe, kv_cache, topk_indices, batch, scale, round_probs = operands
    rank, rope = ql_nope.shape[2], q_pe.shape[2]
    if rope % LANES:
        ckv, kpe = unpack_latents(kv_cache, rank, rope)
        unpacked = SparseFlashAttention(ql_nope, q_pe, ckv, kpe, topk_indices, batch, scale, round_probs)
        return sparse_flash_attention(unpacked)
    kv_cache = kv_cache if kv_cache.stride(-1) == 1 else kv_cache.contiguous()
    out, lse = _attend(operands, _Cache(kv_cache, kv_cache[..., rank:], rank, rope))
    _repair_non_finite(out, lse, partial(reference.sparse_flash_attention_quant, operands))
    return out, lse


def _repair_non_finite(
    out: torch.Tensor, lse: torch.Tensor, by_reference: Callable[[], tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """Replace tokens with non-finite scores by the reference's result: an online softmax makes NaN of inf - inf."""
    if np.isnan(lse.numpy()).any():
        tokens, expected = lse.isnan().any(dim=1), by_reference()
        out[tokens], lse[tokens] = expected[0][tokens], expected[1][tokens]


def _attend(
    operands: SparseFlashAttention | SparseFlashAttentionQuant, cache: _Cache
) -> tuple[torch.Tensor, torch.Tensor]:
    ql_nope, q_pe, *_, topk_indices, batch, scale, round_probs = operands
    (tokens, heads, rank), dtype, (ckv, kpe, padded_rank, rope) = ql_nope.shape, ql_nope.dtype, cache
    nope, pe = as_rows(ql_nope, 2 * LANES), as_rows(q_pe)
    request, visible = query_layout(batch, tokens)
    indices, block_table = as_int32(topk_indices), as_int32(batch.block_table)
    out, lse = torch.empty(tokens, heads, padded_rank, dtype=nope.dtype), torch.empty(tokens, heads)
    packed("sparse_flash_attention", 4 * ROWS + "pppp" + "iiiiiii" + "di" + ROWS + "p")(
        *rows(nope), *rows(pe), *rows(ckv), *rows(kpe),
        indices.data_ptr(), request.data_ptr(), visible.data_ptr(), block_table.data_ptr(),
        tokens, heads, padded_rank, rope, indices.shape[1], block_table.shape[1], ckv.shape[1],
        scale, round_probs and dtype == torch.bfloat16, *rows(out), lse.data_ptr(),
    )  # fmt: skip
    return (out if padded_rank == rank else out[..., :rank].contiguous()).to(dtype), lse
