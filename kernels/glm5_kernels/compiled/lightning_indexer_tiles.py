"""Scores and choice of the Lightning Indexer, tile by tile of keys."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, int64

from glm5_kernels.compiled.jit import inner, kernel
from glm5_kernels.compiled.lightning_indexer_intrinsics import (
    KEYS,
    scores_of_keys,
    scores_of_pairs,
    scores_of_pairs_of_few,
)
from glm5_kernels.compiled.rows import PAIRED, load_row_as_fp32, transpose
from glm5_kernels.compiled.simd import FP32, STEP, WIDTH, aligned_fp32, in_steps
from glm5_kernels.compiled.topk import best_positions

#: How many keys before it is needed a key's row is asked for: memory answers after some thousand cycles.
AHEAD = 96


@kernel
def choose(tasks: Any, step: Any, scores: Any) -> None:
    """Tasks (int64 [n, fields of a `Task`]): scores of their keys, and what to choose where all are scored.

    scores: fp32, room for those of the largest task.
    """
    for number in range(len(tasks)):
        request, first, last, length, start, stop, chooses = tasks[number]
        pitch = in_steps(length)
        if start < stop:
            _score(step, request, first, last - first, start, stop, scores, pitch)
        if chooses:
            choose_best(scores, pitch, step, first, last)


@inner
def _score(
    step: Any, request: Any, first_token: Any, tokens: Any, start: Any, stop: Any, scores: Any, pitch: Any
) -> None:
    """scores fp32 [tokens, pitch], columns start..stop, of the tokens of `request` from `first_token` on.

    start: a multiple of STEP; scores may be written up to the next one after `stop`. A missing key's score is NaN.
    """
    dims, heads = step.dims, step.weights.shape[1]
    lanes = in_steps(heads) if heads > WIDTH else WIDTH
    together = STEP // min(STEP, lanes)  # tokens whose heads share a block
    blocks, room = -(-lanes // STEP), -(-tokens // together) * together
    query, weights = aligned_fp32(room * lanes * dims), np.zeros((room, lanes), np.float32)
    _lay_out_heads(step, first_token, tokens, query, weights)
    cache, visible, keys = step.keys, step.visible, aligned_fp32(dims * STEP)
    addresses, factor, plain = find_keys(step, request, start, stop, STEP)
    stride = -(-KEYS * cache.row_pitch // (blocks * dims))
    # As numbers: numba counts who holds an array at each look at it, and ten counts take as long as a key's scores.
    all_queries, all_weights, all_scores = query.ctypes.data, weights.ctypes.data, scores.ctypes.data
    all_keys, all_addresses = keys.ctypes.data, addresses.ctypes.data
    for first in range(start, stop, STEP):
        n, place = min(STEP, stop - first), first - start
        ahead = addresses[min(place + AHEAD, stop - start - 1)]
        if cache.kind != PAIRED and cache.kind != FP32:
            for key in range(n):
                load_row_as_fp32(addresses[place + key], dims, cache.kind, all_keys + 4 * key * dims, STEP)
                addresses[place + key] = all_keys + 4 * key * dims
        for row in range(0, tokens, together):
            last = min(row + together, tokens) - 1
            seen, apart = min(n, visible[first_token + last] - first), 4 * pitch * (last - row)
            q, w = all_queries + 4 * row * lanes * dims, all_weights + 4 * row * lanes
            for key in range(0, seen, KEYS):
                rows, out = all_addresses + 8 * (place + key), all_scores + 4 * (row * pitch + first + key)
                next_rows = ahead + key * cache.row_pitch
                if cache.kind == PAIRED and apart == 0 and heads <= WIDTH:
                    scores_of_pairs_of_few(rows, q, w, heads, blocks, dims, out, apart, next_rows, stride)
                elif cache.kind == PAIRED:
                    scores_of_pairs(rows, q, w, heads, blocks, dims, out, apart, next_rows, stride)
                else:
                    scores_of_keys(rows, q, w, heads, blocks, dims, out, apart, next_rows, stride)
            if not plain:
                for base in range(row * pitch + first, (last + 1) * pitch + first, pitch):
                    for key in range(seen):
                        scores[base + key] *= factor[place + key]
    query[0] = weights[0, 0] = keys[0] = 0  # numba frees an array after the last look at it, whoever has its address


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
            transpose(rows.ctypes.data, 0, dims, kind, query.ctypes.data + 4 * place, STEP)


@inner
def find_keys(step: Any, request: Any, start: Any, stop: Any, steps: Any) -> Any:
    """Rows and scales of the keys start..stop of `request`, and whether all scales are 1. A missing key's is NaN.

    The rows' addresses (int64) are a multiple of `steps`: the last one is repeated.
    """
    cache, scales, table, block_size = step.keys, step.key_scale, step.block_table[request], step.block_size
    count, scaled = stop - start, scales.size > 0
    addresses, factor = np.empty(-(-count // steps) * steps, np.int64), np.empty(count, np.float32)
    index, offset, plain = start // block_size, start % block_size, not scaled
    for key in range(len(addresses)):
        block = table[index] if index < len(table) else int64(-1)
        addresses[key] = cache.base + max(block, int64(0)) * cache.block_pitch + offset * cache.row_pitch
        if key < count:
            factor[key] = float32(np.nan) if block < 0 else scales[block, offset] if scaled else float32(1)
            plain = plain and block >= 0
        if key < count - 1:
            offset += 1  # counted on: a division takes as long as many products
        if offset == block_size:
            index, offset = index + 1, int64(0)
    return addresses, factor, plain


@inner
def choose_best(scores: Any, pitch: Any, step: Any, first: Any, last: Any) -> None:
    """Rows of step.out of tokens first..last <- the best of the positions visible to each; scores [tokens, pitch]."""
    scratch = np.empty(2 * (pitch + WIDTH), np.uint32)
    for token in range(first, last):
        seen = max(int64(0), step.visible[token])
        best_positions(scores, (token - first) * pitch, seen, step.out, token, scratch)
