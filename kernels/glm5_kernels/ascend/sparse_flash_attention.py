"""Sparse Flash Attention by vllm-ascend's kernels, `_C_ascend::npu_sparse_flash_attention` and its int8 version."""

from __future__ import annotations

import torch

from glm5_kernels.ascend.operators import HALF, operator, paged, support, support_pages
from glm5_kernels.paged_cache import PagedBatch
from glm5_kernels.sparse_flash_attention import TILE, SparseFlashAttention, SparseFlashAttentionQuant


def sparse_flash_attention(operands: SparseFlashAttention) -> tuple[torch.Tensor, torch.Tensor]:
    """Run attention with round_probs, contiguous caches and no holes in the block table."""
    ql_nope, q_pe, ckv_cache, kpe_cache, topk_indices, batch, scale, round_probs = operands
    _support(ql_nope, q_pe, round_probs)
    support_pages(ckv_cache, kpe_cache)
    return _attend(
        "npu_sparse_flash_attention", ql_nope, ckv_cache, topk_indices, batch, scale,
        query_rope=q_pe.contiguous(), key_rope=kpe_cache[:, :, None],
    )  # fmt: skip


def sparse_flash_attention_quant(operands: SparseFlashAttentionQuant) -> tuple[torch.Tensor, torch.Tensor]:
    """Run attention on packed int8 rows with round_probs and no holes in the block table."""
    ql_nope, q_pe, kv_cache, topk_indices, batch, scale, round_probs = operands
    _support(ql_nope, q_pe, round_probs)
    support_pages(kv_cache)
    scales = {"key_quant_mode": 2, "value_quant_mode": 2, "quant_scale_repo_mode": 1}  # of each tile, in the row
    return _attend(
        "npu_kv_quant_sparse_flash_attention", torch.cat([ql_nope, q_pe], dim=-1), kv_cache, topk_indices, batch, scale,
        **scales, tile_size=TILE, rope_head_dim=q_pe.shape[2],
    )  # fmt: skip


def _attend(
    name: str,
    query: torch.Tensor,
    cache: torch.Tensor,
    topk: torch.Tensor,
    batch: PagedBatch,
    scale: float,
    **specific: torch.Tensor | int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention by an operator and its `specific` arguments; values are the keys' first columns (attention_mode 2)."""
    keys = cache[:, :, None]
    out, peak, total = operator("_C_ascend", name)(
        query.contiguous(), keys, keys, topk[:, None].int(), scale,
        sparse_block_size=1, attention_mode=2, return_softmax_lse=True, **specific, **paged(batch, "kv"),
    )  # fmt: skip
    # The kernel's maxima and sums [1, T, H] as our log-sum-exp [T, H]; +inf where nothing was summed.
    lse = peak[0].float() + torch.log(total[0].float())
    return out, torch.where(total[0] > 0, lse, torch.inf)


def _support(ql_nope: torch.Tensor, q_pe: torch.Tensor, round_probs: bool) -> None:
    heads, rank, rope = ql_nope.shape[1], ql_nope.shape[2], q_pe.shape[2]
    support(ql_nope.dtype in HALF, f"takes bf16 or fp16, got {ql_nope.dtype}")
    support(round_probs, "rounds the probabilities before P @ V: ask for round_probs")
    support((rank, rope) == (512, 64), f"takes 512 + 64 columns, got {rank} + {rope}")
    support(heads <= 128 and heads & (heads - 1) == 0, f"takes 1, 2, 4, ... 128 heads, got {heads}")
