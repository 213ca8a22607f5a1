"""Scores of the Lightning Indexer by AMX: 32 keys by 32 heads at a time, keys in place in the cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import float32, int64

from glm5_kernels.compiled import amx
from glm5_kernels.compiled.amx import SIDE, TILE, LeftAt, OutAt, RightAt
from glm5_kernels.compiled.jit import inner, kernel
from glm5_kernels.compiled.lightning_indexer_tiles import as_task, select_best
from glm5_kernels.compiled.rows import load_row_as_fp32, prefetch, store_row_as, transpose
from glm5_kernels.compiled.simd import (
    BF16,
    FP32,
    INT8,
    STEP,
    WIDTH,
    Lanes,
    aligned_fp32,
    i64_const,
    in_steps,
    intrinsic,
    sum_each,
)

#: Keys whose weighted heads are added up at a time.
KEYS = 8
#: Keys are prefetched this many keys ahead.
PREFETCH_DISTANCE = 96


class AmxWorkspace(NamedTuple):
    """Memory of a thread; the caller owns it. Heads are padded to a multiple of SIDE, dims count pairs of bf16.

    Attributes:
        scores: fp32, the scores of the largest task.
        query: [tokens, heads / 16, dims, 16] pairs of bf16.
        products: fp32 [heads / SIDE, SIDE, SIDE].
        keys: bf16 [SIDE, 2 * dims], converted from int8. row: fp32 [2 * dims], of one key.
    """

    scores: Any
    query: Any
    products: Any
    keys: Any
    row: Any


def new_amx_workspace(scores: Any, tokens: int, heads: int, dims: int) -> AmxWorkspace:
    heads, aligned = -(-heads // SIDE) * SIDE, aligned_fp32
    return AmxWorkspace(
        scores, aligned(tokens * heads * dims), aligned(heads * SIDE), aligned(SIDE * dims), aligned(2 * dims)
    )


@kernel
def select_by_amx(tasks: Any, operands: Any, workspace: Any) -> None:
    """`lightning_indexer_tiles.select` for PAIRED queries, PAIRED or INT8 keys, blocks and heads of whole tiles."""
    amx.configure()
    for number in range(len(tasks)):
        task = as_task(tasks[number])
        pitch = in_steps(task.length)
        if task.start < task.stop:
            _score(operands, task, workspace, pitch)
        if task.selects:
            select_best(workspace.scores, pitch, operands, task)
    amx.release()


@inner
def _score(operands: Any, task: Any, workspace: Any, pitch: Any) -> None:
    """`lightning_indexer_tiles._score`; task.start is a multiple of SIDE."""
    dims, heads, stop = operands.dims, operands.weights.shape[1], task.stop  # dims: pairs of bf16
    padded_heads = -(-heads // SIDE) * SIDE
    _lay_out_queries(operands, task, padded_heads, workspace.query)
    query, products, scores = workspace.query.ctypes.data, workspace.products.ctypes.data, workspace.scores
    table, row_pitch, half = operands.block_table[task.request], operands.keys.row_pitch, 4 * TILE * dims
    for first in range(task.start, stop, SIDE):
        left = _tile_address(operands, table, first)
        second = _tile_address(operands, table, min(first + TILE, stop - 1))
        prefetch(
            _tile_address(operands, table, min(first + PREFETCH_DISTANCE, stop - 1)), SIDE * operands.keys.row_pitch
        )
        if operands.keys.kind == INT8:
            row_pitch = 4 * dims
            left, second = _as_bf16(operands, left, second, workspace.keys.ctypes.data, workspace.row.ctypes.data)
        for token in range(task.last - task.first):
            seen = min(first + SIDE, stop, operands.visible[task.first + token]) - first
            for head in range(0, padded_heads if seen > 0 else 0, SIDE):
                right = query + 4 * (token * padded_heads + head) * dims
                amx.multiply(
                    LeftAt(left, row_pitch, second - left, 1, 0), RightAt(right, 4 * TILE, half, 4 * TILE * TILE),
                    OutAt(products + 4 * head * SIDE, 4 * SIDE, 4 * SIDE * TILE), dims // TILE, 1,
                )  # fmt: skip
            weights = operands.weights.ctypes.data + 4 * (task.first + token) * heads
            column = token * pitch + first
            for key in range(0, seen, KEYS):
                out = scores.ctypes.data + 4 * (column + key)
                _weigh(products + 4 * SIDE * key, weights, heads // TILE, out)
            for key in range(0, seen, TILE):
                _scale(operands, table, first + key, scores, column + key, min(TILE, seen - key))


@inner
def _lay_out_queries(operands: Any, task: Any, padded_heads: Any, query: Any) -> None:
    """query <- [tokens, groups of 16 heads, dims, 16]; the last head fills the padding."""
    rows, dims, heads = operands.query, operands.dims, operands.weights.shape[1]
    addresses = np.empty(WIDTH, np.int64)
    for token in range(task.last - task.first):
        base = rows.base + (task.first + token) * rows.block_pitch
        for first in range(0, padded_heads, TILE):
            for head in range(TILE):
                addresses[head] = base + min(first + head, heads - 1) * rows.row_pitch
            target = query.ctypes.data + 4 * (token * padded_heads + first) * dims
            transpose(addresses.ctypes.data, 0, dims, FP32, target, TILE)  # pairs move as 32 bits


@inner
def _scale(operands: Any, table: Any, position: Any, scores: Any, column: Any, keys: Any) -> None:
    """Multiply the scores of a tile's keys, from `column` on, with their scales; NaN where the block is missing."""
    index, offset = position // operands.block_size, position % operands.block_size
    if index >= len(table) or table[index] < 0:
        for key in range(keys):
            scores[column + key] = float32(np.nan)
    elif operands.key_scale.size:
        for key in range(keys):
            scores[column + key] *= operands.key_scale[table[index], offset + key]


@inner
def _as_bf16(operands: Any, first: Any, second: Any, out: Any, row: Any) -> Any:
    """Convert two tiles of int8 rows to consecutive bf16 rows at `out`; the addresses of both tiles."""
    dims = 2 * operands.dims
    for key in range(SIDE):
        source = (first if key < TILE else second) + key % TILE * operands.keys.row_pitch
        load_row_as_fp32(source, dims, INT8, row, STEP)
        store_row_as(row, dims, BF16, out + 2 * dims * key)
    return int64(out), int64(out + 2 * dims * TILE)


@inner
def _tile_address(operands: Any, table: Any, position: Any) -> Any:
    """The address of the first key of the tile that holds `position`; any valid row if its block is missing."""
    index, offset = position // operands.block_size, position % operands.block_size // TILE * TILE
    block = table[index] if index < len(table) else int64(0)
    return operands.keys.base + max(block, int64(0)) * operands.keys.block_pitch + offset * operands.keys.row_pitch


@intrinsic()
def _weigh(v: Lanes, products: Any, weights: Any, groups: Any, out: Any) -> None:
    """out[0:KEYS] <- for each key, the sum over heads of weights[h] * relu(product).

    products: fp32 [sides, SIDE, SIDE], of which the first KEYS rows of each side; weights: fp32 [groups of 16 heads].
    """
    builder = v.builder
    zero, sums = v.constant(0.0), [v.variable(0.0) for _ in range(KEYS)]
    with v.loop(groups) as group:
        w = v.load(weights, builder.mul(group, i64_const(WIDTH)))
        side, half = builder.udiv(group, i64_const(2)), builder.urem(group, i64_const(2))
        start = builder.add(builder.mul(side, i64_const(SIDE * SIDE)), builder.mul(half, i64_const(WIDTH)))
        for key, total in enumerate(sums):
            product = v.load(products, builder.add(start, i64_const(SIDE * key)))
            positive = v.larger(zero, product)  # NaN stays
            builder.store(v.add_products(w, positive, builder.load(total)), total)
    scores = sum_each(builder, builder.fadd, [builder.load(total) for total in sums])
    builder.store(scores, builder.inttoptr(out, scores.type.as_pointer())).align = 4
