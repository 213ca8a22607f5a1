"""Sparse Flash Attention in C++ (csrc/sparse_flash_attention.h)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from glm5_kernels import sparse_flash_attention as reference
from glm5_kernels.native.library import function
from glm5_kernels.native.rows import LANES, ROWS, as_int32, as_rows, rows
from glm5_kernels.paged_cache import query_layout
from glm5_kernels.sparse_flash_attention import SparseFlashAttention, SparseFlashAttentionQuant, unpack_latents


def sparse_flash_attention(operands: SparseFlashAttention) -> tuple[torch.Tensor, torch.Tensor]:
    ckv, kpe = as_rows(operands.ckv_cache, 2 * LANES), as_rows(operands.kpe_cache)
    if ckv.dtype != kpe.dtype:
        ckv, kpe = ckv.float(), kpe.float()
    return _attend(operands, ckv, kpe, reference.sparse_flash_attention)


def sparse_flash_attention_quant(operands: SparseFlashAttentionQuant) -> tuple[torch.Tensor, torch.Tensor]:
    ql_nope, q_pe, kv_cache, topk_indices, batch, scale, round_probs = operands
    rank, rope = ql_nope.shape[2], q_pe.shape[2]
    if rope % LANES:
        ckv, kpe = unpack_latents(kv_cache, rank, rope)
        unpacked = SparseFlashAttention(ql_nope, q_pe, ckv, kpe, topk_indices, batch, scale, round_probs)
        return sparse_flash_attention(unpacked)
    kv_cache = kv_cache if kv_cache.stride(-1) == 1 else kv_cache.contiguous()
    return _attend(operands, kv_cache, kv_cache[..., rank:], reference.sparse_flash_attention_quant)


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
