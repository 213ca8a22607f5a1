"""Lightning Indexer compiled: keys turned once per tile, scores of a few tokens at a time, top-k by counting.

Memory: fp32 scores of at most `SCORES` (token, position) pairs per thread, whatever the context's length is.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from numba import float32, int64, njit

from glm5_kernels.compiled.rows import KINDS, PAIRED, turn
from glm5_kernels.compiled.simd import HEADS, PAIRS, STEP, WIDTH, lined
from glm5_kernels.compiled.threads import each
from glm5_kernels.compiled.topk import best_positions
from glm5_kernels.lightning_indexer.cpu_intrinsics import tile_scores, tile_scores_of_pairs
from glm5_kernels.lightning_indexer.reference import check, check_quant
from glm5_kernels.paged_cache import query_layout

#: 32 MiB of scores.
SCORES = 2**23
#: Query tokens that share a turned tile of keys.
TOKENS = 64
#: Keys of a part, where one request's keys are shared among threads.
SPAN = 4096


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
    pairs = PAIRS and q.dtype == k_cache.dtype == torch.bfloat16 and not dim % (2 * WIDTH) and k_cache.stride(-1) == 1
    query = torch.zeros(num_tokens, *padded, dtype=torch.bfloat16 if pairs else torch.float32)
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

    table, kind = block_table.long().numpy(), PAIRED if pairs else KINDS[k_cache.dtype]
    block_bytes, row_bytes = (k_cache.stride(i) * k_cache.element_size() for i in (0, 1))
    place = k_cache.data_ptr(), block_bytes, row_bytes, kind, k_cache.shape[1]
    factors = (torch.empty(0, 0) if k_scale is None else k_scale).numpy()
    queries, heads_weights, visible_to, chosen = (x.numpy() for x in (query.view(torch.float32), weight, visible, out))

    given = queries, heads_weights, place, factors, table, visible_to, chosen
    threads = torch.get_num_threads()
    if len(tasks) < threads:
        for task in tasks:
            _in_parts(task, *given)
        return out
    size = len(tasks) if threads == 1 else max(1, len(tasks) // (4 * threads))
    rows = np.array(tasks)
    each(lambda number: _whole(rows[number * size : (number + 1) * size], *given), -(-len(tasks) // size))
    return out


def _in_parts(
    task: tuple[int, int, int], queries: Any, weights: Any, place: Any, factors: Any, table: Any, visible: Any, out: Any
) -> None:
    """One long request: its keys in parts for all threads."""
    request, first, last = task
    length, seen = int(visible[last - 1]), visible[first:last]
    scores = np.empty((last - first, -(-length // STEP) * STEP), np.float32)

    def part(number: int) -> None:
        _score(
            queries[first:last], weights[first:last], place, factors, table[request], seen,
            number * SPAN, min((number + 1) * SPAN, length), scores,
        )  # fmt: skip

    each(part, -(-length // SPAN))
    _best(scores, seen, out[first:last])


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _whole(
    tasks: Any, queries: Any, weights: Any, place: Any, factors: Any, table: Any, visible: Any, out: Any
) -> None:
    """Tasks [n, 3] of some tokens each: request, first token, the one after the last."""
    for number in range(len(tasks)):
        request, first, last = tasks[number]
        length, seen = visible[last - 1], visible[first:last]
        scores = np.empty((last - first, -(-length // STEP) * STEP), np.float32)
        _score(queries[first:last], weights[first:last], place, factors, table[request], seen, 0, length, scores)
        _best(scores, seen, out[first:last])


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _score(
    query: Any, weight: Any, place: Any, factors: Any, table: Any, visible: Any, start: Any, stop: Any, scores: Any
) -> None:
    """scores[token, start:stop] of a few tokens of one request, whose keys lie where `place` and `table` say.

    place: address of the cache, bytes from block to block and row to row, kind of element, rows of a block. Where the
        kind is PAIRED, query holds two bf16 in the place of an fp32.
    factors: fp32 [num_blocks, block_size] scale of each key, or empty.
    start: a multiple of STEP; scores may be written up to the next one after `stop`. A missing key's score is NaN.
    """
    cache, block_bytes, row_bytes, kind, block_size = place
    tokens, heads, dims = query.shape
    keys = lined(dims * STEP)
    addresses, factor = np.empty(STEP, np.int64), np.empty(STEP, np.float32)
    index, offset = start // block_size, start % block_size  # counted on: a division takes as long as many products
    for first in range(start, stop, STEP):
        n, plain = min(STEP, stop - first), factors.size == 0
        for key in range(n):
            block = table[index] if index < len(table) else int64(-1)
            addresses[key] = cache + max(block, int64(0)) * block_bytes + offset * row_bytes
            factor[key] = float32(1)
            if block < 0:
                factor[key], plain = float32(np.nan), False
            elif factors.size:
                factor[key] = factors[block, offset]
            offset += 1
            if offset == block_size:
                index, offset = index + 1, int64(0)
        for key in range(n, STEP):
            addresses[key] = addresses[n - 1]
        for key in range(0, STEP, WIDTH):
            turn(addresses.ctypes.data + 8 * key, dims, 0 if kind == PAIRED else kind, keys.ctypes.data + 4 * key, STEP)
        ahead, stride = addresses[0], int64(0)
        if index < len(table) and table[index] >= 0:
            ahead = cache + table[index] * block_bytes + offset * row_bytes
            stride = -(-STEP * row_bytes // (heads // HEADS * dims))
        for token in range(tokens):
            seen = min(n, visible[token] - first)
            operands = keys.ctypes.data, query[token].ctypes.data, weight[token].ctypes.data, heads, dims
            if seen > 0 and kind == PAIRED:
                tile_scores_of_pairs(*operands, scores[token].ctypes.data + 4 * first, ahead, stride)
            elif seen > 0:
                tile_scores(*operands, scores[token].ctypes.data + 4 * first, ahead, stride)
            if not plain:
                for key in range(seen):
                    scores[token, first + key] *= factor[key]


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _best(scores: Any, visible: Any, out: Any) -> None:
    scratch = np.empty((4, scores.shape[1]), np.uint32)
    for token in range(len(out)):
        best_positions(scores[token], max(int64(0), visible[token]), out.shape[1], out[token], scratch)
