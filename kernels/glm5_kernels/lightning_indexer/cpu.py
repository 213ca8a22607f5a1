"""Lightning Indexer compiled: a lane for each head, so that keys are read where they lie; top-k by counting.

Memory: fp32 scores of at most `SCORES` (token, position) pairs per thread, whatever the context's length is.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import float32, int64

from glm5_kernels.compiled.jit import inner, kernel
from glm5_kernels.compiled.rows import KINDS, PAIRED, RowAddress, load_row_as_fp32, row_address, transpose
from glm5_kernels.compiled.simd import FP32, PAIRS, STEP, WIDTH, aligned_fp32, in_steps
from glm5_kernels.compiled.threads import each
from glm5_kernels.compiled.topk import best_positions
from glm5_kernels.lightning_indexer.cpu_intrinsics import KEYS, scores_of_keys, scores_of_pairs
from glm5_kernels.lightning_indexer.reference import check, check_quant
from glm5_kernels.paged_cache import PagedBatch, query_layout, readable

#: 32 MiB of scores.
SCORES = 2**23
#: Query tokens of a task: they share the keys that were read.
TOKENS = 64
#: How many keys before it is needed a key's row is asked for: memory answers after some thousand cycles.
AHEAD = 96
#: Keys of a part, where one request's keys are shared among threads.
SPAN = 4096


class IndexerCall(NamedTuple):
    """All tokens' queries and all requests' keys; T tokens, H heads, D dims (a multiple of WIDTH).

    Attributes:
        query: rows (token, head) of D elements; where their kind is PAIRED, the keys' is, too.
        dims: of query and keys, in elements of 32 bits once they are fp32 or pairs.
        weights: fp32 [T, H].
        visible: int64 [T]. block_table: int64 [B, max_blocks].
        keys: rows (block, offset) of the cache. block_size: rows of a block.
        key_scale: fp32 [num_blocks, block_size] of int8 keys, else empty.
        out: int32 [T, topk].
    """

    query: RowAddress
    dims: int
    weights: Any
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
    num_tokens, _, dim = q.shape
    visible = readable(query_layout(batch, num_tokens)[1], batch, k_cache.shape[1])
    pairs = PAIRS and q.dtype == k_cache.dtype == torch.bfloat16 and not dim % (2 * WIDTH)
    q, k_cache = _whole_rows(q), _whole_rows(k_cache)
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

    kind = PAIRED if pairs else None
    step = IndexerCall(
        row_address(q, kind), q.shape[2] // (2 if pairs else 1), weights.float().numpy(),
        visible.numpy(), batch.block_table.long().numpy(), row_address(k_cache, kind), k_cache.shape[1],
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


def _whole_rows(x: torch.Tensor) -> torch.Tensor:
    """x, if its rows are of a kind that can be read where they lie; else as fp32, zeros behind each row."""
    if x.dtype in KINDS and x.stride(-1) == 1 and not x.shape[-1] % WIDTH:
        return x
    return torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % WIDTH)).contiguous()


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
    dims, heads = step.dims, step.weights.shape[1]
    lanes = in_steps(heads) if heads > WIDTH else WIDTH
    together, blocks = (
        STEP // min(STEP, lanes),
        -(-lanes // STEP),
    )  # tokens whose heads share a block; blocks of a token
    room = -(-tokens // together) * together
    query, weights = aligned_fp32(room * lanes * dims), np.zeros((room, lanes), np.float32)
    _lay_out_heads(step, first_token, tokens, query, weights)
    cache, table, block_size = step.keys, step.block_table[request], step.block_size
    keys, stride = aligned_fp32(dims * STEP), -(-KEYS * cache.row_pitch // (blocks * dims))
    addresses, factor = np.empty(STEP, np.int64), np.empty(STEP, np.float32)
    index, offset = start // block_size, start % block_size  # counted on: a division takes as long as many products
    for first in range(start, stop, STEP):
        n = min(STEP, stop - first)
        index, offset, plain = _find_keys(step, table, index, offset, n, addresses, factor)
        if cache.kind != PAIRED and cache.kind != FP32:
            for key in range(n):
                load_row_as_fp32(addresses[key], dims, cache.kind, keys.ctypes.data + 4 * key * dims, STEP)
                addresses[key] = keys.ctypes.data + 4 * key * dims
        for key in range(n, STEP):
            addresses[key] = addresses[n - 1]
        ahead = _row_ahead(step, table, first + AHEAD, addresses[0])
        for row in range(0, tokens, together):
            last = min(row + together, tokens) - 1
            seen, apart = min(n, step.visible[first_token + last] - first), 4 * pitch * (last - row)
            q, w = query.ctypes.data + 4 * row * lanes * dims, weights.ctypes.data + 4 * row * lanes
            for key in range(0, seen, KEYS):
                rows, out = addresses.ctypes.data + 8 * key, scores.ctypes.data + 4 * (row * pitch + first + key)
                if cache.kind == PAIRED:
                    scores_of_pairs(rows, q, w, heads, blocks, dims, out, apart, ahead + key * cache.row_pitch, stride)
                else:
                    scores_of_keys(rows, q, w, heads, blocks, dims, out, apart, ahead + key * cache.row_pitch, stride)
            if not plain:
                for place in range(row * pitch + first, (last + 1) * pitch + first, pitch):
                    for key in range(seen):
                        scores[place + key] *= factor[key]


@inner
def _row_ahead(step: Any, table: Any, position: Any, otherwise: Any) -> Any:
    """Address of the row of the key at `position`, if there is one."""
    index = position // step.block_size
    if index < len(table) and table[index] >= 0:
        return step.keys.base + table[index] * step.keys.block_pitch + position % step.block_size * step.keys.row_pitch
    return otherwise


@inner
def _lay_out_heads(step: Any, first_token: Any, tokens: Any, query: Any, weights: Any) -> None:
    """A lane for each head: query <- [blocks of all tokens, dims, STEP], weights <- fp32 [tokens, lanes of each]."""
    cache, dims, heads, lanes = step.query, step.dims, step.weights.shape[1], weights.shape[1]
    rows, kind = np.empty(WIDTH, np.int64), FP32 if cache.kind == PAIRED else cache.kind  # pairs move as 32 bits
    for token in range(tokens):
        base = cache.base + (first_token + token) * cache.block_pitch
        for head in range(heads):
            weights[token, head] = step.weights[first_token + token, head]
        for first in range(0, lanes, WIDTH):
            for lane in range(WIDTH):
                rows[lane] = base + min(first + lane, heads - 1) * cache.row_pitch
            group = token * lanes + first
            place = group // STEP * STEP * dims + group % STEP
            transpose(rows.ctypes.data, dims, kind, query.ctypes.data + 4 * place, STEP)


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
    scratch = np.empty(2 * (pitch + 1), np.uint32)
    for token in range(first, last):
        seen = max(int64(0), step.visible[token])
        best_positions(scores, (token - first) * pitch, seen, step.out, token, scratch)
