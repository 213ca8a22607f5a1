"""Rows quantized, multiplied and scaled back in one pass: a linear layer of few tokens, or the experts of a layer.

The same numbers as `int8`'s plain versions, bit for bit.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from glm5_kernels import int8
from glm5_kernels.compiled.int8_backends import INT4_ZERO, INT8_ZERO, STEP, TILE, Matrix
from glm5_kernels.compiled.int8_product import (
    ROWS,
    TASK_ROWS,
    empty_codes,
    has_padding,
    multiply_rows,
    multiply_token,
    padded_columns,
    padded_tokens,
)
from glm5_kernels.compiled.int8_quantize import (
    QuantizedRows,
    copied_sum,
    numbers,
    quantize_rows,
    quantize_rows_static,
    rows_per_task,
    scale_row,
)
from glm5_kernels.compiled.jit import inner, kernel
from glm5_kernels.compiled.rows import ELEMENT_BYTES, RowAddress, matrix_address
from glm5_kernels.compiled.simd import WIDTH
from glm5_kernels.compiled.threads import LEAST_BYTES, run_ranges
from glm5_kernels.w4a8_moe import ExpertWeights


class Groups(NamedTuple):
    """Rows sorted by group.

    rows: int64 [P], of x. starts: int64 [E + 1], where the rows of each group begin. used: int64 [U], the groups that
    have rows, and -1 behind them.
    """

    rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    used: NDArray[np.int64]


class Weights(NamedTuple):
    """The weights of all groups, as blocks of equal shape in the order of their rows.

    blocks: their addresses, int64, the same number for each group. rows: of a block. pitch: bytes from a row in memory
    to the next one. packed: INT4, two rows in one of memory. n: rows of a group. scales: address of fp32 [groups, n].
    zero: z of such weights (`int8_backends`).
    """

    blocks: NDArray[np.int64]
    rows: int
    pitch: int
    packed: bool
    n: int
    scales: int
    zero: int


def of_layer(weight: torch.Tensor, scale: torch.Tensor) -> Weights:
    """The weights int8 [N, K] of a linear layer, as `takes_weight` says, with scale fp32 [N]."""
    n = weight.shape[0]
    return Weights(np.array([weight.data_ptr()]), n, weight.stride(0), False, n, scale.data_ptr(), INT8_ZERO)


def of_experts(weights: ExpertWeights, scale: torch.Tensor) -> Weights:
    """The weights of experts, rows a multiple of WIDTH and columns of STEP, with scale fp32 [E, N]."""
    zero = INT4_ZERO if weights.packed else INT8_ZERO
    n = scale.shape[1]
    return Weights(weights.addresses, weights.rows, weights.pitch, weights.packed, n, scale.data_ptr(), zero)


@cache
def one_group(tokens: int) -> Groups:
    """All rows of x in one group."""
    return Groups(np.arange(tokens), np.array([0, tokens]), np.array([0]))


def takes_weight(weight: torch.Tensor, scale: torch.Tensor) -> bool:
    """True if `grouped_product` takes weight [N, K] of a linear layer with scale [N]."""
    n, k = weight.shape
    whole = not n % WIDTH and weight.stride(-1) == 1 and (not k % STEP or has_padding(weight))
    return whole and weight.dtype == torch.int8 and scale.dtype == torch.float32 and scale.is_contiguous()


class Quantized(NamedTuple):
    """codes int8 [T, K in whole steps] and factors fp32 [T, 1] of rows; bias: int32 [N] or [], added to the sums."""

    codes: NDArray[np.int8]
    factors: NDArray[np.float32]
    bias: NDArray[np.int32] = np.empty(0, np.int32)


def quantized(x: torch.Tensor, static: int8.LinearWeights | None = None) -> Quantized:
    """x fp32 or bf16 [T, K], K a multiple of WIDTH, with a scale for each row, or as a static layer says."""
    tokens, k = x.shape
    columns = padded_columns(k)
    codes = np.empty((tokens, k), np.int8) if columns == k else np.zeros((tokens, columns), np.int8)
    source, target, size = matrix_address(x), QuantizedRows(codes, k), rows_per_task(k)
    if static is None:
        factors = np.empty((tokens, 1), np.float32)
        run_ranges(quantize_rows, tokens, size, source, target, factors)
        return Quantized(codes, factors)
    factors = np.ones((tokens, 1), np.float32)
    input_scale, offset, bias = static.input_scale, static.input_offset, static.quant_bias
    assert input_scale is not None and offset is not None and bias is not None
    run_ranges(quantize_rows_static, tokens, size, source, target, *numbers(input_scale, offset))
    return Quantized(codes, factors, bias.numpy())


def grouped_product(x: Quantized, groups: Groups, weights: Weights, dtype: torch.dtype) -> torch.Tensor:
    """x[rows] -> [P, N] in `dtype`: each row times the weights of its group, scaled back."""
    out = torch.empty(groups.rows.size, weights.n, dtype=dtype)
    blocks_per_group = len(weights.blocks) // (len(groups.starts) - 1)
    tasks = len(groups.used) * blocks_per_group * -(-weights.rows // TASK_ROWS)
    size = LEAST_BYTES // (TASK_ROWS * weights.pitch)
    run_ranges(_multiply_groups, tasks, size, x, groups, weights, matrix_address(out))
    return out


@kernel
def _multiply_groups(
    first: int, last: int, quantized: Quantized, groups: Groups, weights: Weights, out: RowAddress
) -> None:
    """Tasks first..last, each TASK_ROWS rows of a block; of a group with one row a TILE-th of them in each quarter."""
    tasks_per_block, blocks_per_group = -(-weights.rows // TASK_ROWS), weights.n // weights.rows
    gathered, x, start, sums = -1, empty_codes(0, STEP), np.empty(0, np.int32), np.empty((0, ROWS), np.int32)
    quarter, quarter_sums = weights.rows // TASK_ROWS * WIDTH, np.empty((TILE, WIDTH), np.int32)
    for task in range(first, last):
        number, task_of_block = task // tasks_per_block, task % tasks_per_block
        group, block_of_group = groups.used[number // blocks_per_group], number % blocks_per_group
        if group < 0:
            break
        block, column = group * blocks_per_group + block_of_group, block_of_group * weights.rows
        begin, end = groups.starts[group], groups.starts[group + 1]
        if group != gathered:  # one copy of the tokens serves all tasks of the group
            gathered, (x, start) = group, _gather(quantized.codes, groups.rows, begin, end, weights.zero)
            sums = np.empty((len(x), ROWS), np.int32)
        if end - begin == 1 and task_of_block * WIDTH < quarter:
            low, distance = task_of_block * WIDTH, weights.pitch * quarter // (2 if weights.packed else 1)
            for part in range(TILE):
                _begin(quarter_sums[part], start[0], quantized.bias, column + low + part * quarter)
            multiply_token(x, _matrix(weights, block, low), weights.packed, distance, quarter_sums)
            for part in range(TILE):
                factor = quantized.factors[groups.rows[begin], 0]
                _scale(quarter_sums[part], factor, weights, group, out, begin, column + low + part * quarter)
            continue
        for low in range(task_of_block * TASK_ROWS, min((task_of_block + 1) * TASK_ROWS, weights.rows), ROWS):
            count = min(ROWS, weights.rows - low)
            for token in range(len(x)):
                _begin(sums[token, :count], start[token], quantized.bias, column + low)
            multiply_rows(x, _matrix(weights, block, low), weights.packed, 0, count, sums)
            for token in range(end - begin):
                factor = quantized.factors[groups.rows[begin + token], 0]
                _scale(sums[token, :count], factor, weights, group, out, begin + token, column + low)


@inner
def _matrix(weights: Weights, block: int, row: int) -> Matrix:
    """The weights of a block from a row on."""
    line = row // 2 if weights.packed else row
    return Matrix(weights.blocks[block] + weights.pitch * line, weights.pitch)


@inner
def _begin(sums: NDArray[np.int32], start: int, bias: NDArray[np.int32], column: int) -> None:
    """sums <- start, plus the bias of the columns from `column` on if there is one."""
    for row in range(len(sums)):
        sums[row] = start + bias[column + row] if len(bias) else start


@inner
def _scale(
    sums: NDArray[np.int32],
    factor: np.float32,
    weights: Weights,
    group: int,
    out: RowAddress,
    row: int,
    column: int,
) -> None:
    """Row `row` of out, from `column` on, <- sums * factor * the scales of these columns."""
    scales = weights.scales + 4 * (weights.n * group + column)
    target = out.base + out.row_pitch * row + ELEMENT_BYTES[out.kind] * column
    scale_row(sums.ctypes.data, len(sums), factor, scales, out.kind, target)


@inner
def _gather(
    codes: NDArray[np.int8], rows: NDArray[np.int64], begin: int, end: int, zero: int
) -> tuple[NDArray[np.int8], NDArray[np.int32]]:
    """int8 [padded tokens, K]: the codes of rows[begin:end]; and int32 [padded tokens], -zero times their sums."""
    x = empty_codes(padded_tokens(end - begin), codes.shape[1])
    start = np.zeros(len(x), np.int32)
    for token in range(end - begin):
        row = codes.ctypes.data + codes.strides[0] * rows[begin + token]
        start[token] = -zero * copied_sum(row, codes.shape[1], x.ctypes.data + x.strides[0] * token)
    return x, start
