"""Lightning Indexer compiled: keys turned once per tile, scores of a few tokens at a time, top-k by counting.

Memory: fp32 scores of at most `SCORES` (token, position) pairs per thread, whatever the context's length is.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from numba import float32, int64, njit

from glm5_kernels.gather import KINDS, turn
from glm5_kernels.lightning_indexer.reference import check, check_quant
from glm5_kernels.lightning_indexer.vectors import TILE, tile_scores
from glm5_kernels.paged import query_layout
from glm5_kernels.simd import GROUPS, HEADS, WIDTH
from glm5_kernels.threads import each
from glm5_kernels.topk import best_positions

#: 32 MiB of scores.
SCORES = 2**23
#: Query tokens that share a turned tile of keys.
TOKENS = 64


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
    return _choose(q, k_cache, weights, None, query_start_loc, seq_lens, block_table, topk)


def lightning_indexer_quant(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    weights: torch.Tensor,
    q_scale: torch.Tensor,
    k_scale_cache: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    topk: int,
) -> torch.Tensor:
    """See the package docstring."""
    check_quant(q, k_cache, q_scale, k_scale_cache)
    check(q, k_cache, weights, seq_lens, block_table, topk)
    scaled = q.float() * q_scale.float()[..., None]
    return _choose(scaled, k_cache, weights, k_scale_cache.float(), query_start_loc, seq_lens, block_table, topk)


def _choose(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    weights: torch.Tensor,
    k_scale: torch.Tensor | None,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    topk: int,
) -> torch.Tensor:
    num_tokens, heads, dim = q.shape
    _, visible = query_layout(query_start_loc, seq_lens, num_tokens)
    padded = -(-heads // HEADS) * HEADS, -(-dim // WIDTH) * WIDTH  # zeros change no sum
    query = torch.zeros(num_tokens, *padded)
    query[:, :heads, :dim] = q
    weight = torch.zeros(num_tokens, padded[0])
    weight[:, :heads] = weights
    if k_cache.dtype not in KINDS or k_cache.stride(-1) != 1 or dim != padded[1]:
        k_cache = torch.nn.functional.pad(k_cache.float(), (0, padded[1] - dim))
    out = torch.full((num_tokens, topk), -1, dtype=torch.int32)
    tasks = []
    for request, (start, end) in enumerate(itertools.pairwise(query_start_loc.tolist())):
        length = int(visible[end - 1]) if end > start else 0
        step = min(TOKENS, max(1, SCORES // max(length, 1)))
        if length > 0:
            tasks += [(request, first, min(first + step, end)) for first in range(start, end, step)]

    table, kind = block_table.long().numpy(), KINDS[k_cache.dtype]
    block_bytes, row_bytes = (k_cache.stride(i) * k_cache.element_size() for i in (0, 1))
    factors = (torch.empty(0, 0) if k_scale is None else k_scale).numpy()

    def one(number: int) -> None:
        request, first, last = tasks[number]
        _tokens(
            query[first:last].numpy(), weight[first:last].numpy(), k_cache.data_ptr(), block_bytes, row_bytes, kind,
            k_cache.shape[1], factors, table[request], visible[first:last].numpy(), out[first:last].numpy(),
        )  # fmt: skip

    each(one, len(tasks))
    return out


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _tokens(
    query: Any, weight: Any, cache: Any, block_bytes: Any, row_bytes: Any, kind: Any, block_size: Any, factors: Any,
    table: Any, visible: Any, out: Any,
) -> None:  # fmt: skip
    """Rows of `out` for a few tokens of one request; its keys lie at `cache` and where `table` says.

    factors: fp32 [num_blocks, block_size] scale of each key, or empty.
    """
    tokens, heads, dims = query.shape
    length = visible[tokens - 1]
    scores = np.empty((tokens, -(-length // TILE) * TILE), np.float32)
    keys, addresses = np.empty((dims, TILE), np.float32), np.empty(WIDTH, np.int64)
    missing = np.zeros(length, np.bool_)
    for start in range(0, length, TILE):
        stop = min(start + TILE, length)
        for first in range(start, stop, WIDTH):
            for lane in range(WIDTH):
                position = min(first + lane, length - 1)
                block = table[position // block_size] if position // block_size < len(table) else int64(-1)
                missing[position] = block < 0
                addresses[lane] = cache + max(block, int64(0)) * block_bytes + position % block_size * row_bytes
            turn(addresses.ctypes.data, dims, kind, keys.ctypes.data + 4 * (first - start), TILE)
        for token in range(tokens):
            for first in range(start, min(stop, visible[token]), WIDTH * GROUPS):
                tile_scores(
                    keys.ctypes.data + 4 * (first - start), query[token].ctypes.data, weight[token].ctypes.data,
                    heads, dims, scores[token].ctypes.data + 4 * first,
                )  # fmt: skip
    scratch = np.empty(length, np.uint64)
    for token in range(tokens):
        seen = max(int64(0), visible[token])
        for position in range(seen):
            if missing[position]:
                scores[token, position] = float32(np.nan)
            elif factors.size:
                scores[token, position] *= factors[table[position // block_size], position % block_size]
        best_positions(scores[token], seen, out.shape[1], out[token], scratch)
