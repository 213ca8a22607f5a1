"""The Lightning Indexer's choice by scores of int16, where those are faster than fp32, and the same choice.

Scores of rounded operands have a bound on their error. So the k-th largest of them says which keys are chosen for sure,
which are not, and for which the fp32 scores must be known: a few in a hundred. `cpu_tiles.choose` scores and chooses
those, as it does all keys on other processors.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import float32, int32, int64, uint32

from glm5_kernels.compiled.jit import inner, kernel, shared
from glm5_kernels.compiled.rounded_rows import LARGEST, NORM, ROUNDED, round_rows
from glm5_kernels.compiled.rows import RowAddress
from glm5_kernels.compiled.simd import STEP, WIDTH, aligned_fp32, in_steps
from glm5_kernels.compiled.topk import count_at_least, kth_largest, ordered, unordered
from glm5_kernels.lightning_indexer.call import IndexerCall
from glm5_kernels.lightning_indexer.cpu_tiles import AHEAD, choose, find_keys
from glm5_kernels.lightning_indexer.cpu_words_intrinsics import TILE, scores_of_words

#: Keys rounded at a time: whole tiles, and whole groups of ROUNDED.
KEYS = math.lcm(TILE, ROUNDED)


@kernel
def choose_by_words(tasks: Any, step: Any, scores: Any) -> None:
    """Tasks (int64 [n, fields of a `Task`]) that are scored and chosen whole, as `choose` does.

    scores: fp32, room for the largest task's tokens times its length in whole KEYS.
    """
    for number in range(len(tasks)):
        request, first, last, length = tasks[number, :4]
        pitch = -(-length // KEYS) * KEYS
        slack = np.empty(last - first, np.float32)
        _score(step, request, first, last - first, length, scores, pitch, slack)
        scratch, lists = np.empty(pitch + WIDTH, np.uint32), np.empty((2, length + 1), np.int32)
        for token in range(first, last):
            row = scores[(token - first) * pitch : (token - first + 1) * pitch]
            seen = max(int64(0), step.visible[token])
            sure, doubtful = _sort_out(row, seen, step.out.shape[1], slack[token - first], scratch, lists)
            _write(step, request, token, lists[0], sure, lists[1], doubtful)


@inner
def _score(
    step: Any, request: Any, first_token: Any, tokens: Any, length: Any, scores: Any, pitch: Any, slack: Any
) -> None:
    """scores fp32 [tokens, pitch] <- about the scores; slack fp32 [tokens] <- twice what they may be wrong by.

    NaN: of a key that is missing, or cannot be rounded.
    """
    dims, lanes = step.dims, in_steps(step.weights.shape[1])
    query, weights = aligned_fp32(tokens * lanes * dims // 2), np.zeros((tokens, lanes), np.float32)
    _lay_out_heads(step, first_token, tokens, query, weights, slack)
    cache, visible, blocks, pairs = step.keys, step.visible, lanes // STEP, dims // 2
    addresses, scale, plain = find_keys(step, request, int64(0), length, KEYS)
    words, factors, widest = aligned_fp32(KEYS * pairs), np.empty(KEYS, np.float32), float32(0)
    stride = -(-TILE * cache.row_pitch // (blocks * pairs))
    all_queries, all_weights, all_scores = query.ctypes.data, weights.ctypes.data, scores.ctypes.data
    all_words, all_factors, all_addresses = words.ctypes.data, factors.ctypes.data, addresses.ctypes.data
    for first in range(0, length, KEYS):
        n, ahead = min(KEYS, length - first), addresses[min(first + AHEAD, length - 1)]
        round_all(all_addresses + 8 * first, KEYS, dims, all_words, all_factors)
        for key in range(n):
            if factors[key] > widest:
                widest = factors[key]
            if not plain:
                factors[key] *= scale[first + key]
        for row in range(tokens):
            seen = min(n, visible[first_token + row] - first)
            q, w = all_queries + 4 * row * lanes * pairs, all_weights + 4 * row * lanes
            for key in range(0, seen, TILE):
                rows, factor, out = all_words + 4 * key * pairs, all_factors + 4 * key, all_scores + 4 * (first + key)
                next_rows = ahead + key * cache.row_pitch
                scores_of_words(rows, q, w, blocks, pairs, factor, out + 4 * row * pitch, next_rows, stride)
    query[0] = weights[0, 0] = words[0] = 0  # numba frees an array after the last look at it, whoever has its address
    share = _relative_error(dims, step.weights.shape[1])
    for token in range(tokens):
        slack[token] = 2 * (widest * NORM * (share * slack[token] + 1e-30) + 1e-30)


@shared
def round_all(rows: Any, count: Any, dims: Any, out: Any, factors: Any) -> None:
    """`round_rows` of `count` rows, a multiple of ROUNDED."""
    for row in range(0, count, ROUNDED):
        round_rows(rows + 8 * row, dims, out + 2 * row * dims, factors + 4 * row)


@inner
def _relative_error(dims: Any, heads: Any) -> Any:
    """Of a head's product of norms and weight: what rounding to int16, and then fp32 sums in any order, may change."""
    rounding = math.sqrt(dims) / NORM + dims / NORM**2 / 4
    return 1.01 * (rounding + (dims + 2 * heads + 64) * 2.0**-23)


@inner
def _lay_out_heads(step: Any, first_token: Any, tokens: Any, query: Any, weights: Any, strength: Any) -> None:
    """A lane for each head: query <- int16 pairs [blocks of all tokens, dims / 2, STEP]; weights <- fp32 [tokens,
    lanes], times the heads' factors; strength <- the sum over heads of |weight| times norm."""
    cache, pairs, heads, lanes = step.query, step.dims // 2, step.weights.shape[1], weights.shape[1]
    sources, factors = np.empty(lanes, np.int64), np.empty(lanes, np.float32)
    words = aligned_fp32(lanes * pairs)
    for token in range(tokens):
        base, total = cache.base + (first_token + token) * cache.block_pitch, float32(0)
        for lane in range(lanes):
            sources[lane] = base + min(lane, heads - 1) * cache.row_pitch
        round_all(sources.ctypes.data, lanes, step.dims, words.ctypes.data, factors.ctypes.data)
        for lane in range(lanes):
            place = (token * lanes + lane) // STEP * STEP * pairs + lane % STEP
            for pair in range(pairs):
                query[place + pair * STEP] = words[lane * pairs + pair]
        for head in range(heads):
            weight = step.weights[first_token + token, head]
            weights[token, head] = weight * factors[head]
            total += abs(weight) * factors[head] * float32(NORM)
        strength[token] = total
        if not total <= LARGEST:
            weights[token, 0] = np.nan  # and so is every score


@inner
def _sort_out(scores: Any, seen: Any, k: Any, slack: Any, values: Any, lists: Any) -> Any:
    """lists[0] <- the positions < seen that are among the k best for sure, lists[1] <- those that may be, by
    scores that are wrong by half of `slack` at most, or NaN; both ascending.

    Returns:
        how many of each.
    """
    bits = scores.view(np.uint32)
    for position in range(seen):
        values[position] = ordered(bits[position])
    low, high = uint32(1), uint32(0)  # all, if there are no more than k
    if seen > k:
        least = kth_largest(values, seen, k)[0]
        known = count_at_least(values.ctypes.data, -(-seen // WIDTH), uint32(1))
        if known >= k:
            limits = np.empty(2, np.float32)
            limit_bits = limits.view(np.uint32)
            limit_bits[0] = unordered(least)
            limits[0], limits[1] = limits[0] - slack, limits[0] + slack
            low, high = ordered(limit_bits[0]), ordered(limit_bits[1])
        if known < seen:
            high = uint32(0xFFFFFFFF)  # one that is not known may take any place
    sure, doubtful = int64(0), int64(0)
    for position in range(seen):  # without a branch, which would be guessed wrong at every other one
        value = values[position]
        lists[0, sure] = int32(position)
        lists[1, doubtful] = int32(position)
        sure += int64(value > high)
        doubtful += int64((value >= low) & (value <= high)) | int64(value == 0)
    return sure, doubtful


@inner
def _write(step: Any, request: Any, token: Any, sure: Any, found: Any, doubtful: Any, left: Any) -> None:
    """Row `token` of step.out <- the positions sure[:found] and the best of doubtful[:left] by fp32 scores."""
    k, row = step.out.shape[1], step.out[token]
    picked = np.empty((1, k - found), np.int32)
    for place in range(k - found):
        picked[0, place] = int32(-1)
    if found < k and left > 0:
        _choose_among(step, request, token, doubtful, left, picked)
    taken, other = int64(0), int64(0)
    for place in range(k):
        next_picked = picked[0, other] if other < k - found else int32(-1)
        position = doubtful[next_picked] if next_picked >= 0 else int32(-1)
        if taken < found and (position < 0 or sure[taken] < position):
            row[place] = sure[taken]
            taken += 1
        else:
            row[place] = position
            other += int64(position >= 0)


@inner
def _choose_among(step: Any, request: Any, token: Any, positions: Any, count: Any, picked: Any) -> None:
    """picked int32 [1, k] <- the best of positions[:count] by fp32 scores: as a request of its own, in blocks of one
    key, whose number is the key's distance from the first row."""
    table, cache, query = np.empty((1, count), np.int64), step.keys, step.query
    blocks, size = step.block_table[request], step.block_size
    for number in range(count):
        index, offset = positions[number] // size, positions[number] % size
        block = blocks[index] if index < len(blocks) else int64(-1)
        table[0, number] = block * cache.block_pitch + offset * cache.row_pitch if block >= 0 else int64(-1)
    task, visible = np.zeros((1, 7), np.int64), np.empty(1, np.int64)
    task[0, 2] = task[0, 6] = 1
    task[0, 3] = task[0, 5] = visible[0] = count
    alone = IndexerCall(
        RowAddress(query.base + token * query.block_pitch, query.block_pitch, query.row_pitch, query.kind),
        step.dims, step.weights[token : token + 1], visible, table,
        RowAddress(cache.base, int64(1), cache.row_pitch, cache.kind), int64(1), step.key_scale, picked,
    )  # fmt: skip
    choose(task, alone, np.empty(in_steps(count), np.float32))
