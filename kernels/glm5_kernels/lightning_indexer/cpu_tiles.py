"""Scores and choice of the Lightning Indexer, tile by tile of keys."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, int64

from glm5_kernels.compiled.jit import inner, kernel
from glm5_kernels.compiled.rows import PAIRED, load_row_as_fp32, transpose
from glm5_kernels.compiled.simd import FP32, STEP, WIDTH, aligned_fp32, in_steps
from glm5_kernels.compiled.topk import best_positions
from glm5_kernels.lightning_indexer.cpu_intrinsics import KEYS, scores_of_keys, scores_of_pairs, scores_of_pairs_of_few

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
                if cache.kind == PAIRED and apart == 0 and heads <= WIDTH:
                    scores_of_pairs_of_few(
                        rows, q, w, heads, blocks, dims, out, apart, ahead + key * cache.row_pitch, stride
                    )
                elif cache.kind == PAIRED:
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
            transpose(rows.ctypes.data, 0, dims, kind, query.ctypes.data + 4 * place, STEP)


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
def choose_best(scores: Any, pitch: Any, step: Any, first: Any, last: Any) -> None:
    """Rows of step.out of tokens first..last <- the best of the positions visible to each; scores [tokens, pitch]."""
    scratch = np.empty(2 * (pitch + WIDTH), np.uint32)
    for token in range(first, last):
        seen = max(int64(0), step.visible[token])
        best_positions(scores, (token - first) * pitch, seen, step.out, token, scratch)
