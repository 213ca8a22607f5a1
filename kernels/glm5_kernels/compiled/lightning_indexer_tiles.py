"""Scores and selection of the Lightning Indexer by vectors: STEP keys at a time, a lane for each head."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import float32, int64

from glm5_kernels.compiled.jit import inner, kernel
from glm5_kernels.compiled.rows import PAIRED, load_row_as_fp32, prefetch_line, transpose
from glm5_kernels.compiled.simd import (
    FP32,
    GROUPS,
    HEADS,
    I32,
    I64,
    STEP,
    UNROLLED,
    WIDTH,
    Lanes,
    aligned_fp32,
    i64_const,
    in_steps,
    intrinsic,
    sum_each,
)
from glm5_kernels.compiled.topk import best_positions

#: Keys whose sums are held in registers, with GROUPS lane groups of heads.
KEYS = HEADS


def _scores(add: Callable[..., Any]) -> Any:
    """The intrinsic out[0:KEYS] <- for each key, the sum over heads of weights[h] * relu(query[:, h] . key).

    Every dot product adds its dims in order; every score adds the heads of a lane in order, then the groups, then the
    lanes as `sum_each` does: no bit depends on the other keys and tokens of the call.

    Arguments of the intrinsic (int64; elements have 32 bits, fp32 or, where `add` is `Lanes.add_pairs`, two bf16):
        rows: address of the addresses of KEYS keys [dims]; dims is a multiple of UNROLLED.
        query: [blocks, dims, STEP], the heads in blocks of STEP lanes.
        weights: [blocks * STEP], of which the first `heads` count.
        out: fp32 [KEYS].
        prefetch: memory to prefetch, `stride` bytes further with every dim of every block: a few lines at a time,
            because a core tracks only ten or so outstanding lines.
    """

    @intrinsic()
    def scores_of_keys(
        v: Lanes, rows: Any, query: Any, weights: Any, heads: Any, blocks: Any, dims: Any, out: Any, prefetch: Any,
        stride: Any,
    ) -> None:  # fmt: skip
        builder = v.builder
        table = builder.inttoptr(rows, I64.as_pointer())
        keys = [builder.load(builder.gep(table, [i64_const(key)])) for key in range(KEYS)]
        scores = [[v.variable(0.0) for _ in range(KEYS)] for _ in range(GROUPS)]
        sums = [[v.variable(0.0) for _ in range(GROUPS)] for _ in range(KEYS)]
        with v.loop(blocks) as block:
            _add_dots(v, add, sums, keys, query, builder.mul(block, dims), dims, (prefetch, stride))
            for g in range(GROUPS):
                first = builder.add(builder.mul(block, i64_const(STEP)), i64_const(WIDTH * g))
                is_head = _lanes_below(builder, builder.sub(heads, first))
                _add_weighted(v, scores[g], [row[g] for row in sums], v.load(weights, first), is_head)
        loaded = [[builder.load(score) for score in row] for row in scores]
        totals = sum_each(
            builder, builder.fadd, [functools.reduce(builder.fadd, key) for key in zip(*loaded, strict=True)]
        )
        builder.store(totals, builder.inttoptr(out, totals.type.as_pointer())).align = 4

    return scores_of_keys


def _add_dots(
    v: Lanes, add: Callable[..., Any], sums: list[list[Any]], keys: list[Any], query: Any, first_row: Any, dims: Any,
    prefetch: tuple[Any, Any],
) -> None:  # fmt: skip
    """sums[key][group] <- the dot products of a block of the query, whose rows begin at `first_row`, with the keys."""
    builder, (prefetch_base, stride) = v.builder, prefetch
    for total in (total for row in sums for total in row):
        builder.store(v.constant(0.0), total)
    with v.loop(builder.sdiv(dims, i64_const(UNROLLED))) as step:
        first_dim = builder.mul(step, i64_const(UNROLLED))
        for number in range(UNROLLED):
            dim = builder.add(first_dim, i64_const(number))
            row = builder.add(first_row, dim)
            if number % 2 == 0:
                prefetch_line(builder, builder.add(prefetch_base, builder.mul(stride, row)))
            offset = builder.mul(row, i64_const(STEP))
            columns = [v.load(query, builder.add(offset, i64_const(WIDTH * g))) for g in range(len(sums[0]))]
            for key, totals in zip(keys, sums, strict=True):
                element = v.broadcast(v.load_scalar(key, dim))
                for total, column in zip(totals, columns, strict=True):
                    builder.store(add(v, element, column, builder.load(total)), total)


def _add_weighted(v: Lanes, scores: list[Any], dots: list[Any], weights: Any, is_head: Any) -> None:
    """scores[key] += weights * relu(dots[key]) in the lanes of heads."""
    builder, zero = v.builder, v.constant(0.0)
    for score, dot in zip(scores, dots, strict=True):
        positive = v.larger(zero, builder.load(dot))  # NaN stays
        positive = builder.select(is_head, positive, zero)  # padding: 0 * inf would be NaN
        builder.store(v.add_products(weights, positive, builder.load(score)), score)


def _lanes_below(builder: Any, count: Any) -> Any:
    """A mask of the first `count` (int64) lanes."""
    numbers = ir.Constant(ir.VectorType(I32, WIDTH), list(range(WIDTH)))
    return builder.icmp_signed("<", numbers, Lanes(builder).broadcast(builder.trunc(count, I32)))


scores_of_keys, scores_of_pairs = _scores(Lanes.add_products), _scores(Lanes.add_pairs)


#: Rows of keys are prefetched this many keys ahead: memory answers after some thousand cycles.
PREFETCH_DISTANCE = 96


class Task(NamedTuple):
    """Query tokens first..last of a request.

    Attributes:
        length: positions that the last token sees.
        start, stop: the positions to score; start is a multiple of STEP.
        selects: whether all positions are scored afterwards, so that the best can be selected.
    """

    request: int
    first: int
    last: int
    length: int
    start: int
    stop: int
    selects: bool


class IndexerWorkspace(NamedTuple):
    """Memory of a thread. The caller owns it: compiled code reads it by address.

    Attributes:
        scores: fp32, the scores of the largest task.
        weights: fp32 [tokens, lanes], a lane for each head, in blocks of STEP lanes; padding is 0.
        query: fp32 [tokens * lanes * dims].
        keys: fp32 [STEP * dims], keys converted to fp32.
    """

    scores: Any
    weights: Any
    query: Any
    keys: Any


def new_workspace(scores: Any, tokens: int, heads: int, dims: int) -> IndexerWorkspace:
    lanes = in_steps(heads)
    query, keys = aligned_fp32(tokens * lanes * dims), aligned_fp32(STEP * dims)
    return IndexerWorkspace(scores, np.zeros((tokens, lanes), np.float32), query, keys)


@inner
def as_task(row: Any) -> Any:
    """A row of an array of tasks as numbers, which stay in registers; the fields of a record are read at each use."""
    return Task(row.request, row.first, row.last, row.length, row.start, row.stop, row.selects)


@kernel
def select(tasks: Any, operands: Any, workspace: Any) -> None:
    """Score the keys of the tasks (records with the fields of `Task`), and select where all keys are scored."""
    for number in range(len(tasks)):
        task = as_task(tasks[number])
        pitch = in_steps(task.length)
        if task.start < task.stop:
            _score(operands, task, workspace, pitch)
        if task.selects:
            select_best(workspace.scores, pitch, operands, task)


@inner
def _score(operands: Any, task: Any, workspace: Any, pitch: Any) -> None:
    """workspace.scores [tokens, pitch], columns start..stop; a missing key's score is NaN.

    Scores may be written up to the next multiple of STEP.
    """
    start, stop, tokens = task.start, task.stop, task.last - task.first
    dims, heads, lanes = operands.dims, operands.weights.shape[1], workspace.weights.shape[1]
    blocks = lanes // STEP
    _lay_out_heads(operands, task, workspace)
    rows, visible = operands.keys, operands.visible
    addresses, scale, is_plain = find_keys(operands, task)
    prefetch_stride = -(-KEYS * rows.row_pitch // (blocks * dims))
    # As numbers: numba counts references at each use of an array, and ten counts take as long as a key's scores.
    query, weights = workspace.query.ctypes.data, workspace.weights.ctypes.data
    scores, keys, all_addresses = workspace.scores.ctypes.data, workspace.keys.ctypes.data, addresses.ctypes.data
    for first in range(start, stop, STEP):
        count, index = min(STEP, stop - first), first - start
        prefetch = addresses[min(index + PREFETCH_DISTANCE, stop - start - 1)]
        if rows.kind != PAIRED and rows.kind != FP32:
            for key in range(count):
                load_row_as_fp32(addresses[index + key], dims, rows.kind, keys + 4 * key * dims, STEP)
                addresses[index + key] = keys + 4 * key * dims
        for token in range(tokens):
            seen, column = min(count, visible[task.first + token] - first), token * pitch + first
            q, w = query + 4 * token * lanes * dims, weights + 4 * token * lanes
            for key in range(0, seen, KEYS):
                key_rows, out = all_addresses + 8 * (index + key), scores + 4 * (column + key)
                ahead = prefetch + key * rows.row_pitch
                if rows.kind == PAIRED:
                    scores_of_pairs(key_rows, q, w, heads, blocks, dims, out, ahead, prefetch_stride)
                else:
                    scores_of_keys(key_rows, q, w, heads, blocks, dims, out, ahead, prefetch_stride)
            if not is_plain:
                for key in range(seen):
                    workspace.scores[column + key] *= scale[index + key]


@inner
def _lay_out_heads(operands: Any, task: Any, workspace: Any) -> None:
    """A lane for each head: workspace.query <- [blocks of all tokens, dims, STEP], and weights."""
    rows, dims, heads, weights = operands.query, operands.dims, operands.weights.shape[1], workspace.weights
    kind = FP32 if rows.kind == PAIRED else rows.kind  # pairs move as 32 bits
    heads_of_group = np.empty(WIDTH, np.int64)
    for token in range(task.last - task.first):
        base = rows.base + (task.first + token) * rows.block_pitch
        for head in range(heads):
            weights[token, head] = operands.weights[task.first + token, head]
        for first in range(0, weights.shape[1], WIDTH):
            for lane in range(WIDTH):
                heads_of_group[lane] = base + min(first + lane, heads - 1) * rows.row_pitch
            group = token * weights.shape[1] + first
            target = workspace.query.ctypes.data + 4 * (group // STEP * STEP * dims + group % STEP)
            transpose(heads_of_group.ctypes.data, 0, dims, kind, target, STEP)


@inner
def find_keys(operands: Any, task: Any) -> Any:
    """Addresses (int64) and scales of a task's keys, and whether all scales are 1. A missing key's scale is NaN.

    Addresses are padded to a multiple of STEP by repeating the last one.
    """
    rows, scales, table = operands.keys, operands.key_scale, operands.block_table[task.request]
    count, scaled, block_size = task.stop - task.start, scales.size > 0, operands.block_size
    addresses, scale = np.empty(in_steps(count), np.int64), np.empty(count, np.float32)
    index, offset, is_plain = task.start // block_size, task.start % block_size, not scaled
    for key in range(len(addresses)):
        block = table[index] if index < len(table) else int64(-1)
        addresses[key] = rows.base + max(block, int64(0)) * rows.block_pitch + offset * rows.row_pitch
        if key < count:
            scale[key] = float32(np.nan) if block < 0 else scales[block, offset] if scaled else float32(1)
            is_plain = is_plain and block >= 0
        if key < count - 1:
            offset += 1  # incremented: a division takes as long as many products
        if offset == block_size:
            index, offset = index + 1, int64(0)
    return addresses, scale, is_plain


@inner
def select_best(scores: Any, pitch: Any, operands: Any, task: Any) -> None:
    """operands.out of the task's tokens <- the best positions visible to each; scores [tokens, pitch]."""
    scratch = np.empty(2 * (pitch + WIDTH), np.uint32)
    for token in range(task.first, task.last):
        visible = max(int64(0), operands.visible[token])
        best_positions(scores, (token - task.first) * pitch, visible, operands.out, token, scratch)
