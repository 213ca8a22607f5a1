"""Scores of the Lightning Indexer by AMX: 32 keys by 32 heads at a time, keys where they lie in the cache."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, int64, types
from numba.extending import intrinsic

from glm5_kernels.compiled import amx
from glm5_kernels.compiled.amx import SIDE, TILE, LeftAt, OutAt, RightAt
from glm5_kernels.compiled.jit import inner, kernel
from glm5_kernels.compiled.lightning_indexer_tiles import choose_best
from glm5_kernels.compiled.rows import load_row_as_fp32, prefetch, store_row_as, transpose
from glm5_kernels.compiled.simd import (
    BF16,
    FP32,
    INT8,
    STEP,
    WIDTH,
    Lanes,
    aligned_fp32,
    for_range,
    i64_const,
    in_steps,
    returns_void,
    sum_each,
)

#: Keys whose weighted heads are added up at a time.
KEYS = 8
#: Keys that are asked for before they are needed.
AHEAD = 96


@kernel
def choose_by_amx(tasks: Any, step: Any, scores: Any) -> None:
    """`cpu_tiles.choose` for PAIRED queries, PAIRED or INT8 keys, blocks and heads of whole tiles."""
    amx.configure()
    for number in range(len(tasks)):
        request, first, last, length, start, stop, chooses = tasks[number]
        pitch = in_steps(length)
        if start < stop:
            _score(step, request, first, last - first, start, stop, scores, pitch)
        if chooses:
            choose_best(scores, pitch, step, first, last)
    amx.release()


@inner
def _score(
    step: Any, request: Any, first_token: Any, tokens: Any, start: Any, stop: Any, scores: Any, pitch: Any
) -> None:
    """As `cpu_tiles._score`; start is a multiple of SIDE."""
    dims, heads = step.dims, step.weights.shape[1]  # dims: pairs of bf16
    whole = -(-heads // SIDE) * SIDE
    query, products = aligned_fp32(tokens * whole * dims), aligned_fp32(whole * SIDE)
    _lay_out_queries(step, first_token, tokens, whole, query)
    table, row_pitch, half = step.block_table[request], step.keys.row_pitch, 4 * TILE * dims
    converted, row = aligned_fp32(SIDE * dims), aligned_fp32(2 * dims)
    for first in range(start, stop, SIDE):
        left, second = _tile_address(step, table, first), _tile_address(step, table, min(first + TILE, stop - 1))
        prefetch(_tile_address(step, table, min(first + AHEAD, stop - 1)), SIDE * step.keys.row_pitch)
        if step.keys.kind == INT8:
            row_pitch = 4 * dims
            left, second = _as_bf16(step, left, second, converted.ctypes.data, row.ctypes.data)
        for token in range(tokens):
            seen = min(first + SIDE, stop, step.visible[first_token + token]) - first
            for head in range(0, whole if seen > 0 else 0, SIDE):
                right = query.ctypes.data + 4 * (token * whole + head) * dims
                out = products.ctypes.data + 4 * head * SIDE
                amx.multiply(
                    LeftAt(left, row_pitch, second - left, 1, 0), RightAt(right, 4 * TILE, half, 4 * TILE * TILE),
                    OutAt(out, 4 * SIDE, 4 * SIDE * TILE), dims // TILE, 1,
                )  # fmt: skip
            weights = step.weights.ctypes.data + 4 * (first_token + token) * heads
            for key in range(0, seen, KEYS):
                place = scores.ctypes.data + 4 * (token * pitch + first + key)
                _weigh(products.ctypes.data + 4 * SIDE * key, weights, heads // TILE, place)
            for key in range(0, seen, TILE):
                place = token * pitch + first + key
                _scale(step, table, first + key, scores, place, min(TILE, seen - key))


@inner
def _lay_out_queries(step: Any, first_token: Any, tokens: Any, whole: Any, query: Any) -> None:
    """query <- [tokens, groups of 16 heads, dims, 16] of `whole` heads; the last one fills up what is missing."""
    cache, dims, heads = step.query, step.dims, step.weights.shape[1]
    rows = np.empty(WIDTH, np.int64)
    for token in range(tokens):
        base = cache.base + (first_token + token) * cache.block_pitch
        for first in range(0, whole, TILE):
            for head in range(TILE):
                rows[head] = base + min(first + head, heads - 1) * cache.row_pitch
            place = query.ctypes.data + 4 * (token * whole + first) * dims
            transpose(rows.ctypes.data, 0, dims, FP32, place, TILE)  # pairs move as 32 bits


@inner
def _scale(step: Any, table: Any, position: Any, scores: Any, place: Any, keys: Any) -> None:
    """The scores at `place` of the keys of a tile, times their scales; NaN where their block is missing."""
    index, offset = position // step.block_size, position % step.block_size
    if index >= len(table) or table[index] < 0:
        for key in range(keys):
            scores[place + key] = float32(np.nan)
    elif step.key_scale.size:
        for key in range(keys):
            scores[place + key] *= step.key_scale[table[index], offset + key]


@inner
def _as_bf16(step: Any, first: Any, second: Any, out: Any, row: Any) -> Any:
    """Two tiles of int8 rows as bf16 rows at `out`, one behind the other; where each begins."""
    dims = 2 * step.dims
    for key in range(SIDE):
        source = (first if key < TILE else second) + key % TILE * step.keys.row_pitch
        load_row_as_fp32(source, dims, INT8, row, STEP)
        store_row_as(row, dims, BF16, out + 2 * dims * key)
    return int64(out), int64(out + 2 * dims * TILE)


@inner
def _tile_address(step: Any, table: Any, position: Any) -> Any:
    """Of the row of the first key of the tile that `position` is in; of some row where its block is missing."""
    index, offset = position // step.block_size, position % step.block_size // TILE * TILE
    block = table[index] if index < len(table) else int64(0)
    return step.keys.base + max(block, int64(0)) * step.keys.block_pitch + offset * step.keys.row_pitch


@intrinsic  # type: ignore[untyped-decorator]
def _weigh(_: Any, products: Any, weights: Any, groups: Any, out: Any) -> Any:
    """out[0:KEYS] <- for each key, the sum over heads of weights[h] * relu(product).

    products: fp32 [sides, SIDE, SIDE], of which the first KEYS rows of each side; weights: fp32 [groups of 16 heads].
    """

    def generate(builder: Any, arguments: Any) -> None:
        products, weights, groups, out = arguments
        v = Lanes(builder)
        zero, sums = v.constant(0.0), [v.variable(0.0) for _ in range(KEYS)]
        with for_range(builder, groups) as group:
            w = v.load(weights, builder.mul(group, i64_const(WIDTH)))
            side, half = builder.udiv(group, i64_const(2)), builder.urem(group, i64_const(2))
            start = builder.add(builder.mul(side, i64_const(SIDE * SIDE)), builder.mul(half, i64_const(WIDTH)))
            for key, total in enumerate(sums):
                product = v.load(products, builder.add(start, i64_const(SIDE * key)))
                positive = v.larger(zero, product)  # NaN stays
                builder.store(v.add_products(w, positive, builder.load(total)), total)
        found = sum_each(v, [builder.load(total) for total in sums])
        builder.store(found, builder.inttoptr(out, found.type.as_pointer())).align = 4

    return types.void(*[int64] * 4), returns_void(generate)
