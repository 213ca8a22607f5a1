"""Plain torch version of the Lightning Indexer: readable, deterministic, bounded memory."""

from __future__ import annotations

import itertools
from functools import cache

import torch

from glm5_kernels.errors import KernelInputError, require_device, require_floats, require_shape
from glm5_kernels.paged_cache import PagedBatch, cache_rows, check_blocks, physical_rows, query_layout, readable

#: fp32 elements of one block's [rows, H, S] score tensor; 2**24 is 64 MiB.
BLOCK_ELEMENTS = 2**24


def lightning_indexer(
    q: torch.Tensor, k_cache: torch.Tensor, weights: torch.Tensor, batch: PagedBatch, topk: int
) -> torch.Tensor:
    check(q, k_cache, weights, batch, topk)
    return _select(q, k_cache, weights, None, batch, topk)


def lightning_indexer_quant(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    weights: torch.Tensor,
    q_scale: torch.Tensor,
    k_scale_cache: torch.Tensor,
    batch: PagedBatch,
    topk: int,
) -> torch.Tensor:
    check_quant(q, k_cache, q_scale, k_scale_cache)
    check(q, k_cache, weights, batch, topk)
    scaled = q.float() * q_scale.float()[..., None]
    return _select(scaled, k_cache, weights, k_scale_cache[..., None], batch, topk)


def quantize_indexer(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate and quantize x [..., D] to int8 [..., D] and fp16 scales [...], for `lightning_indexer_quant`.

    Raises:
        KernelInputError: D is not a power of two.
    """
    size = x.shape[-1]
    if size & (size - 1):
        raise KernelInputError(f"index_head_dim is {size}, the Hadamard rotation needs a power of two")
    y = x.float() @ _rotation(size).to(x.device)
    scale = (y.abs().amax(-1, keepdim=True).clamp_min(1e-6) / 127).to(torch.float16)
    return torch.round(y / scale.float()).clamp_(-127, 127).to(torch.int8), scale[..., 0]


@cache
def _rotation(size: int) -> torch.Tensor:
    """The orthogonal Hadamard matrix; cached, since a server with int8 keys uses it twice per layer and step."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.kron(matrix, torch.tensor([[1.0, 1.0], [1.0, -1.0]]))
    rotation: torch.Tensor = matrix * size**-0.5
    return rotation


def _select(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    weights: torch.Tensor,
    k_scale: torch.Tensor | None,
    batch: PagedBatch,
    topk: int,
) -> torch.Tensor:
    num_tokens, heads, _ = q.shape
    visible = readable(query_layout(batch, num_tokens)[1], batch, k_cache.shape[1])
    out = torch.full((num_tokens, topk), -1, dtype=torch.int32)
    starts = batch.query_start_loc.tolist()
    for b, (start, end) in enumerate(itertools.pairwise(starts)):
        length = int(visible[end - 1]) if end > start else 0
        if length <= 0:
            continue
        rows = physical_rows(torch.arange(length)[None], batch.block_table[b : b + 1], k_cache.shape[1])[0]  # [S]
        keys = cache_rows(k_cache, rows.clamp_min(0)).float()  # [S, D]
        factor = torch.ones(1) if k_scale is None else cache_rows(k_scale, rows.clamp_min(0)).float()[:, 0]  # [S]
        step = max(1, BLOCK_ELEMENTS // (heads * length))
        for lo in range(start, end, step):
            hi = min(lo + step, end)
            seen = (torch.arange(length) < visible[lo:hi, None]) & (rows >= 0)  # [t, S]
            scores = score_keys(q[lo:hi], keys, weights[lo:hi]) * factor
            out[lo:hi] = best_positions(scores, seen, topk)
    return out


def check_quant(q: torch.Tensor, k_cache: torch.Tensor, q_scale: torch.Tensor, k_scale_cache: torch.Tensor) -> None:
    """Raise `KernelInputError` unless the int8 operands and their scales fit."""
    if q.dtype != torch.int8 or k_cache.dtype != torch.int8:
        raise KernelInputError(f"q is {q.dtype} and k_cache {k_cache.dtype}, both must be int8")
    require_shape("q_scale", q_scale, (q.shape[0], q.shape[1]))
    require_shape("k_scale_cache", k_scale_cache, (k_cache.shape[0], k_cache.shape[1]))
    require_floats(q_scale=q_scale, k_scale_cache=k_scale_cache)
    require_device(q, q_scale=q_scale, k_scale_cache=k_scale_cache)


def check(q: torch.Tensor, k_cache: torch.Tensor, weights: torch.Tensor, batch: PagedBatch, topk: int) -> None:
    """Raise `KernelInputError` unless the arguments fit."""
    require_shape("q", q, (None, None, None))
    if 0 in q.shape[1:]:
        raise KernelInputError(f"q has shape {list(q.shape)}, expected at least one head and one dim")
    require_shape("k_cache", k_cache, (None, None, q.shape[2]))
    require_shape("weights", weights, (q.shape[0], q.shape[1]))
    require_floats(weights=weights)
    if q.dtype != torch.int8:
        require_floats(q=q, k_cache=k_cache)
    require_device(q, k_cache=k_cache, weights=weights)
    check_blocks(batch, *k_cache.shape[:2])
    if topk < 1:
        raise KernelInputError(f"topk is {topk}, must be at least 1")


def score_keys(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """q [t, H, D], keys fp32 [S, D], weights [t, H] -> fp32 [t, S]."""
    t, heads, dim = q.shape
    dots = (q.float().reshape(t * heads, dim) @ keys.T).relu_().view(t, heads, -1)  # [t, H, S]
    return torch.bmm(weights.float()[:, None, :], dots)[:, 0]


def best_positions(scores: torch.Tensor, seen: torch.Tensor, topk: int) -> torch.Tensor:
    """The topk seen columns of each row with the largest scores, in ascending order, then -1.

    Among equal scores the lowest columns are selected; NaN never is.
    """
    seen = seen & ~scores.isnan()
    scores = scores.masked_fill(~seen, float("-inf"))
    # stable: equal scores keep their order, so the lowest column comes first
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    hidden_last = torch.sort((~seen).gather(1, order).to(torch.int8), dim=-1, stable=True).indices  # after -inf
    order = order.gather(1, hidden_last)[:, :topk]
    unused = scores.shape[1]  # sorts after every column
    order = order.masked_fill(~seen.gather(1, order), unused).sort(dim=-1).values
    order = order.masked_fill(order == unused, -1)
    return torch.nn.functional.pad(order, (0, topk - order.shape[1]), value=-1).to(torch.int32)
