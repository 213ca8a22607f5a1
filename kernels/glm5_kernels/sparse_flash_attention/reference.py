"""Plain torch version of Sparse Flash Attention: gather the chosen rows, then ordinary fp32 attention."""

from __future__ import annotations

import torch

from glm5_kernels.errors import require_shape
from glm5_kernels.paged import cache_rows, physical_rows, query_layout

#: fp32 elements of one block's gathered [rows, K, R + P] keys; 2**24 is 64 MiB.
BLOCK_ELEMENTS = 2**24


def sparse_flash_attention(
    ql_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    topk_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    round_probs: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the package docstring."""
    check(ql_nope, q_pe, ckv_cache, kpe_cache, topk_indices, seq_lens, block_table)
    num_tokens, heads, rank = ql_nope.shape
    request, visible = query_layout(query_start_loc, seq_lens, num_tokens)
    out = torch.zeros_like(ql_nope, memory_format=torch.contiguous_format)
    lse = torch.full((num_tokens, heads), float("inf"), dtype=torch.float32)
    step = max(1, BLOCK_ELEMENTS // max(1, topk_indices.shape[1] * (rank + q_pe.shape[2])))
    for lo in range(0, num_tokens, step):
        rows_of = slice(lo, min(lo + step, num_tokens))
        rows = usable_rows(
            topk_indices[rows_of], visible[rows_of], block_table[request[rows_of]], ckv_cache.shape[1]
        )  # [t, K]
        ckv = cache_rows(ckv_cache, rows.clamp_min(0)).float()  # [t, K, R]
        kpe = cache_rows(kpe_cache, rows.clamp_min(0)).float()  # [t, K, P]
        used = rows >= 0
        # Unused rows point at cache row 0, which may hold anything, even NaN: keep it out of the products.
        ckv, kpe = ckv.masked_fill(~used[..., None], 0.0), kpe.masked_fill(~used[..., None], 0.0)
        scores = torch.bmm(ql_nope[rows_of].float(), ckv.mT)  # [t, H, K]
        scores = scores + torch.bmm(q_pe[rows_of].float(), kpe.mT)
        scores = (scores * scale).masked_fill(~used[:, None, :], float("-inf"))
        any_used = used.any(dim=-1)
        probs = scores.softmax(dim=-1).masked_fill(~any_used[:, None, None], 0.0)
        if round_probs:
            probs = probs.to(ql_nope.dtype).float()
        out[rows_of] = torch.bmm(probs, ckv).to(out.dtype)
        lse[rows_of] = torch.where(any_used[:, None], scores.logsumexp(dim=-1), float("inf"))
    return out, lse


def check(
    ql_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    topk_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
) -> None:
    """Raise `KernelInputError` unless the arguments fit."""
    require_shape("ql_nope", ql_nope, (None, None, None))
    num_tokens, heads, rank = ql_nope.shape
    require_shape("q_pe", q_pe, (num_tokens, heads, None))
    require_shape("ckv_cache", ckv_cache, (None, None, rank))
    require_shape("kpe_cache", kpe_cache, (ckv_cache.shape[0], ckv_cache.shape[1], q_pe.shape[2]))
    require_shape("topk_indices", topk_indices, (num_tokens, None))
    require_shape("block_table", block_table, (seq_lens.numel(), None))


def usable_rows(
    topk_indices: torch.Tensor, visible: torch.Tensor, block_tables: torch.Tensor, block_size: int
) -> torch.Tensor:
    """Physical cache row of each usable entry of topk_indices [t, K], -1 where it must not be read."""
    positions = topk_indices.long()
    column = torch.arange(positions.shape[1])
    before_end = (positions >= 0).cumprod(dim=-1).bool()  # the first negative entry ends the list
    usable = before_end & (column < visible[:, None]) & (positions < visible[:, None])
    rows = physical_rows(positions.masked_fill(~usable, 0), block_tables, block_size)
    return rows.masked_fill(~usable, -1)
