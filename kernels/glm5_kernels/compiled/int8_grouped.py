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
from glm5_kernels.compiled.int8_backends import INT4_ZERO, INT8_ZERO, STEP, Matrix
from glm5_kernels.compiled.int8_product import (
    empty_codes,
    has_padding,
    multiply_rows,
    padded_columns,
    rows_of,
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
from glm5_kernels.compiled.task_rows import TASK_ROWS, padded_tokens, task_rows
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


class _Rows(NamedTuple):
    """The rows of a group, copied. codes: int8 [count in whole tiles, K]. start: int32, -zero times the sums of codes.

    factors: fp32 [count], their scales. sums: int32 [count in whole tiles, TASK_ROWS], uninitialised.
    """

    codes: NDArray[np.int8]
    start: NDArray[np.int32]
    factors: NDArray[np.float32]
    sums: NDArray[np.int32]


class _Columns(NamedTuple):
    """Addresses of sums, as in `_Rows`; of the bias of a group's columns, or 0; of their scales, and of the output."""

    sums: Matrix
    bias: int
    scales: int
    out: RowAddress


@kernel
def _multiply_groups(
    first: int, last: int, quantized: Quantized, groups: Groups, weights: Weights, out: RowAddress
) -> None:
    """Tasks first..last, each TASK_ROWS rows of a block."""
    tasks = weights.n // weights.rows * -(-weights.rows // TASK_ROWS)
    for number in range(first // tasks, -(-last // tasks)):
        group = groups.used[number]
        if group < 0:
            break
        begin, end = groups.starts[group], groups.starts[group + 1]
        x = _gather(quantized, groups.rows[begin:end], weights.zero)
        target = RowAddress(out.base + out.row_pitch * begin, 0, out.row_pitch, out.kind)
        low, high = max(first - number * tasks, 0), min(last - number * tasks, tasks)
        _multiply_group(low, high, x, quantized.bias, group, weights, target)


@kernel
def _multiply_group(
    first: int, last: int, x: _Rows, bias: NDArray[np.int32], group: int, weights: Weights, out: RowAddress
) -> None:
    """Tasks first..last of one group.

    With one token a task loads nothing from an array but scales: what earlier tasks read has replaced the arrays in
    the nearest cache, and a load waits behind all weights that are on their way.
    """
    start, factors, tokens = x.start, x.factors, len(x.factors)
    codes, size, blocks = rows_of(x.codes), (tokens, x.codes.shape[1]), weights.blocks
    scales, bias_address = weights.scales + 4 * weights.n * group, bias.ctypes.data if len(bias) else 0
    columns = _Columns(rows_of(x.sums), bias_address, scales, out)
    rows, pitch, packed = weights.rows, weights.pitch, weights.packed
    pairs, tasks, first_block = 2 if packed else 1, -(-rows // TASK_ROWS), group * (weights.n // rows)
    start_0, factor_0 = start[0], factors[0]
    for block in range(first // tasks, -(-last // tasks)):
        base, column = blocks[first_block + block], block * rows
        for task in range(max(first - block * tasks, 0), min(last - block * tasks, tasks)):
            part = task_rows(task, rows)
            w = Matrix(base + pitch * (part.first // pairs), pitch)
            lines, distance = part.width // pairs, pitch * (part.distance // pairs)
            multiply_rows(codes, size, w, packed, lines, distance, columns.sums)
            for token in range(tokens):
                begin, factor = (start[token], factors[token]) if token else (start_0, factor_0)
                for run in range(part.runs):
                    first_column = column + part.first + part.distance * run
                    _scale(columns, token, run, first_column, part.columns, begin, factor)


@inner
def _scale(columns: _Columns, token: int, run: int, column: int, count: int, start: int, factor: np.float32) -> None:
    """out of a token, from `column` on, <- (a run of its sums + start + bias) * factor * scales of these columns."""
    sums, out = columns.sums.base + columns.sums.pitch * token + 4 * WIDTH * run, columns.out
    bias = columns.bias + 4 * column if columns.bias else 0
    address = out.base + out.row_pitch * token + ELEMENT_BYTES[out.kind] * column
    scale_row(sums, count, start, bias, factor, columns.scales + 4 * column, out.kind, address)


@inner
def _gather(quantized: Quantized, rows: NDArray[np.int64], zero: int) -> _Rows:
    source, columns, tokens = rows_of(quantized.codes), quantized.codes.shape[1], len(rows)
    x = empty_codes(padded_tokens(tokens), columns)
    start, factors, target = np.zeros(len(x), np.int32), np.empty(tokens, np.float32), rows_of(x)
    for token in range(tokens):
        row, copy = source.base + source.pitch * rows[token], target.base + target.pitch * token
        start[token], factors[token] = -zero * copied_sum(row, columns, copy), quantized.factors[rows[token], 0]
    return _Rows(x, start, factors, np.empty((len(x), TASK_ROWS), np.int32))
