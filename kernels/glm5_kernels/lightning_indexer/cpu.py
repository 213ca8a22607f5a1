"""Lightning Indexer compiled: keys transposed once per tile, scores of a few tokens at a time, top-k by counting.

Memory: fp32 scores of at most `SCORES` (token, position) pairs per thread, whatever the context's length is.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import float32, int64

from glm5_kernels.compiled.jit import inner, kernel
from glm5_kernels.compiled.rows import KINDS, PAIRED, RowAddress, row_address, transpose
from glm5_kernels.compiled.simd import FP32, HEADS, PAIRS, STEP, WIDTH, aligned_fp32, in_steps
from glm5_kernels.compiled.threads import each
from glm5_kernels.compiled.topk import best_positions
from glm5_kernels.lightning_indexer.cpu_intrinsics import tile_scores, tile_scores_of_pairs
from glm5_kernels.lightning_indexer.reference import check, check_quant
from glm5_kernels.paged_cache import PagedBatch, query_layout, readable

#: 32 MiB of scores.
SCORES = 2**23
#: Query tokens that share a transposed tile of keys.
TOKENS = 64
#: Keys of a part, where one request's keys are shared among threads.
SPAN = 4096


class IndexerCall(NamedTuple):
    """All tokens' queries and all requests' keys; T tokens, H heads (a multiple of HEADS), D dims (of WIDTH).

    Attributes:
        query: address of fp32 [T, H, D], or [T, H, D / 2] pairs of bf16 where the keys' kind is PAIRED; padded: its
            H and width. weight: address of fp32 [T, H]. heads: those that count, the others pad.
        visible: int64 [T]. block_table: int64 [B, max_blocks].
        keys: rows (block, offset) of the cache. block_size: rows of a block.
        key_scale: fp32 [num_blocks, block_size] of int8 keys, else empty.
        out: int32 [T, topk].
    """

    query: int
    padded: tuple[int, int]
    weight: int
    heads: int
    visible: Any
    block_table: Any
    keys: RowAddress
    block_size: int
    key_scale: Any
    out: Any


class Task(NamedTuple):
    """Query tokens first..last of a request.

    Attributes:
        length: positions that the last one sees. start, stop: of them, those to be scored; start a multiple of STEP.
        chooses: whether all are scored then, so that the best can be taken.
    """

    request: int
    first: int
    last: int
    length: int
    start: int
    stop: int
    chooses: bool


def lightning_indexer(
    q: torch.Tensor, k_cache: torch.Tensor, weights: torch.Tensor, batch: PagedBatch, topk: int
) -> torch.Tensor:
    """See the package docstring."""
    check(q, k_cache, weights, batch, topk)
    return _choose(q, k_cache, weights, None, batch, topk)


def lightning_indexer_quant(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    weights: torch.Tensor,
    q_scale: torch.Tensor,
    k_scale_cache: torch.Tensor,
    batch: PagedBatch,
    topk: int,
) -> torch.Tensor:
    """See the package docstring."""
    check_quant(q, k_cache, q_scale, k_scale_cache)
    check(q, k_cache, weights, batch, topk)
    scaled = q.float() * q_scale.float()[..., None]
    return _choose(scaled, k_cache, weights, k_scale_cache.float(), batch, topk)


def _choose(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    weights: torch.Tensor,
    k_scale: torch.Tensor | None,
    batch: PagedBatch,
    topk: int,
) -> torch.Tensor:
    num_tokens, heads, dim = q.shape
    visible = readable(query_layout(batch, num_tokens)[1], batch, k_cache.shape[1])
    padded = -(-heads // HEADS) * HEADS, -(-dim // WIDTH) * WIDTH  # zeros change no sum
    pairs = PAIRS and q.dtype == k_cache.dtype == torch.bfloat16 and not dim % (2 * WIDTH) and k_cache.stride(-1) == 1
    query = _padded(q, (num_tokens, *padded), torch.bfloat16 if pairs else torch.float32)
    weight = _padded(weights, (num_tokens, padded[0]), torch.float32)
    if k_cache.dtype not in KINDS or k_cache.stride(-1) != 1 or dim != padded[1]:
        k_cache = torch.nn.functional.pad(k_cache.float(), (0, padded[1] - dim)).contiguous()
    out = torch.full((num_tokens, topk), -1, dtype=torch.int32)
    tasks: list[Task] = []
    seen = visible.tolist()
    for request, (start, end) in enumerate(itertools.pairwise(batch.query_start_loc.tolist())):
        length = seen[end - 1] if end > start else 0
        size = min(TOKENS, max(1, SCORES // max(length, 1)))
        if length > 0:
            for first in range(start, end, size):
                last = min(first + size, end)
                tasks.append(Task(request, first, last, seen[last - 1], 0, seen[last - 1], True))

    keys = row_address(k_cache, PAIRED if pairs else None)
    step = IndexerCall(
        query.data_ptr(), (padded[0], padded[1] // 2 if pairs else padded[1]), weight.data_ptr(), heads,
        visible.numpy(), batch.block_table.long().numpy(), keys, k_cache.shape[1],
        (torch.empty(0, 0) if k_scale is None else k_scale).numpy(), out.numpy(),
    )  # fmt: skip
    threads = torch.get_num_threads()
    if len(tasks) < threads:
        for task in tasks:
            _choose_with_all_threads(task, step)
        return out
    size = len(tasks) if threads == 1 else max(1, len(tasks) // (4 * threads))
    parts = [tasks[number : number + size] for number in range(0, len(tasks), size)]
    each(lambda number: _run(np.array(parts[number]), step, _room(parts[number])), len(parts))
    return out


def _padded(x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """x in `dtype` and, with zeros behind it, in `shape`; contiguous; x itself if it is so already."""
    if x.shape == shape:
        return x.to(dtype).contiguous()
    out = torch.zeros(shape, dtype=dtype)
    out[tuple(slice(size) for size in x.shape)] = x
    return out


def _room(tasks: list[Task]) -> Any:
    """For the scores of one task after the other."""
    return np.empty(max((task.last - task.first) * in_steps(task.length) for task in tasks), np.float32)


def _choose_with_all_threads(task: Task, step: IndexerCall) -> None:
    """One long request: its keys in parts for all threads."""
    scores = _room([task])

    def score_part(number: int) -> None:
        part = task._replace(start=number * SPAN, stop=min((number + 1) * SPAN, task.length), chooses=False)
        _run(np.array([part]), step, scores)

    each(score_part, -(-task.length // SPAN))
    _run(np.array([task._replace(stop=0)]), step, scores)


@kernel
def _run(tasks: Any, step: Any, scores: Any) -> None:
    """tasks: int64 [n, fields of a Task]. scores: fp32, as many as the largest one needs."""
    for number in range(len(tasks)):
        request, first, last, length, start, stop, chooses = tasks[number]
        pitch = in_steps(length)
        _score(step, request, first, last - first, start, stop, scores, pitch)
        if chooses:
            _best(scores, pitch, step, first, last)


@inner
def _score(
    step: Any, request: Any, first_token: Any, tokens: Any, start: Any, stop: Any, scores: Any, pitch: Any
) -> None:
    """scores fp32 [tokens, pitch], columns start..stop, of the tokens of `request` from `first_token` on.

    start: a multiple of STEP; scores may be written up to the next one after `stop`. A missing key's score is NaN.
    """
    heads, dims = step.padded
    cache, table, block_size = step.keys, step.block_table[request], step.block_size
    keys, key_kind = aligned_fp32(dims * STEP), FP32 if cache.kind == PAIRED else cache.kind  # pairs move as 32 bits
    addresses, factor = np.empty(STEP, np.int64), np.empty(STEP, np.float32)
    index, offset = start // block_size, start % block_size  # counted on: a division takes as long as many products
    for first in range(start, stop, STEP):
        n = min(STEP, stop - first)
        index, offset, plain = _find_keys(step, table, index, offset, n, addresses, factor)
        for key in range(n, STEP):
            addresses[key] = addresses[n - 1]
        for key in range(0, STEP, WIDTH):
            transpose(addresses.ctypes.data + 8 * key, dims, key_kind, keys.ctypes.data + 4 * key, STEP)
        ahead, stride = addresses[0], int64(0)
        if index < len(table) and table[index] >= 0:
            ahead = cache.base + table[index] * cache.block_pitch + offset * cache.row_pitch
            stride = -(-STEP * cache.row_pitch // (heads // HEADS * dims))
        for row in range(tokens):
            token, place = first_token + row, row * pitch + first
            seen, out = min(n, step.visible[token] - first), scores.ctypes.data + 4 * place
            query = step.query + 4 * token * heads * dims
            weight = step.weight + 4 * token * heads
            if seen > 0 and cache.kind == PAIRED:
                tile_scores_of_pairs(keys.ctypes.data, query, weight, heads, step.heads, dims, out, ahead, stride)
            elif seen > 0:
                tile_scores(keys.ctypes.data, query, weight, heads, step.heads, dims, out, ahead, stride)
            if not plain:
                for key in range(seen):
                    scores[place + key] *= factor[key]


@inner
def _find_keys(step: Any, table: Any, index: Any, offset: Any, n: Any, addresses: Any, factor: Any) -> Any:
    """addresses and factor <- row and scale of the next n keys from row `offset` of the request's block `index` on.

    Returns:
        where the keys after these begin (index, offset), and whether all factors are 1. A missing key's is NaN.
    """
    cache, plain = step.keys, step.key_scale.size == 0
    for key in range(n):
        block = table[index] if index < len(table) else int64(-1)
        addresses[key] = cache.base + max(block, int64(0)) * cache.block_pitch + offset * cache.row_pitch
        factor[key] = float32(1)
        if block < 0:
            factor[key], plain = float32(np.nan), False
        elif step.key_scale.size:
            factor[key] = step.key_scale[block, offset]
        offset += 1
        if offset == step.block_size:
            index, offset = index + 1, int64(0)
    return index, offset, plain


@inner
def _best(scores: Any, pitch: Any, step: Any, first: Any, last: Any) -> None:
    """Rows of step.out of tokens first..last <- the best of the positions visible to each; scores [tokens, pitch]."""
    scratch = np.empty((3, pitch + 1), np.uint32)
    for token in range(first, last):
        seen, row = max(int64(0), step.visible[token]), (token - first) * pitch
        best_positions(scores[row : row + pitch], seen, step.out.shape[1], step.out[token], scratch)
