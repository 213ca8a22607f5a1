"""Plain torch version of the Lightning Indexer: readable, deterministic, bounded memory."""

from __future__ import annotations

import itertools

import torch

from glm5_kernels.errors import KernelInputError, require_shape
from glm5_kernels.paged import cache_rows, physical_rows, query_layout

#: fp32 elements of one block's [rows, H, S] score tensor; 2**24 is 64 MiB.
BLOCK_ELEMENTS = 2**24


def lightning_indexer(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    weights: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    topk: int,
) -> torch.Tensor:
    """See the package docstring."""
    check(q, k_cache, weights, seq_lens, block_table, topk)
    num_tokens, heads, _ = q.shape
    _, visible = query_layout(query_start_loc, seq_lens, num_tokens)
    out = torch.full((num_tokens, topk), -1, dtype=torch.int32)
    starts = query_start_loc.tolist()
    for b, (start, end) in enumerate(itertools.pairwise(starts)):
        length = int(visible[end - 1]) if end > start else 0
        if length <= 0:
            continue
        rows = physical_rows(torch.arange(length)[None], block_table[b : b + 1], k_cache.shape[1])[0]  # [S]
        keys = cache_rows(k_cache, rows.clamp_min(0)).float()  # [S, D]
        step = max(1, BLOCK_ELEMENTS // (heads * length))
        for lo in range(start, end, step):
            hi = min(lo + step, end)
            seen = (torch.arange(length) < visible[lo:hi, None]) & (rows >= 0)  # [t, S]
            out[lo:hi] = best_positions(score_keys(q[lo:hi], keys, weights[lo:hi]), seen, topk)
    return out


def check(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    weights: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    topk: int,
) -> None:
    """Raise `KernelInputError` unless the arguments fit."""
    require_shape("q", q, (None, None, None))
    require_shape("k_cache", k_cache, (None, None, q.shape[2]))
    require_shape("weights", weights, (q.shape[0], q.shape[1]))
    require_shape("block_table", block_table, (seq_lens.numel(), None))
    if topk < 1:
        raise KernelInputError(f"topk is {topk}, must be at least 1")


def score_keys(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """q [t, H, D], keys fp32 [S, D], weights [t, H] -> fp32 [t, S]."""
    t, heads, dim = q.shape
    dots = (q.float().reshape(t * heads, dim) @ keys.T).relu_().view(t, heads, -1)  # [t, H, S]
    return torch.bmm(weights.float()[:, None, :], dots)[:, 0]


def best_positions(scores: torch.Tensor, seen: torch.Tensor, topk: int) -> torch.Tensor:
    """The topk seen columns of each row, largest score first, lowest column first among equals, then -1."""
    seen = seen & ~scores.isnan()
    scores = scores.masked_fill(~seen, float("-inf"))
    # stable: equal scores keep their order, so the lowest column comes first
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :topk]
    order = torch.where(seen.gather(1, order), order, -1)
    return torch.nn.functional.pad(order, (0, topk - order.shape[1]), value=-1).to(torch.int32)
