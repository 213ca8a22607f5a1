"""Rows quantized, multiplied and scaled back in one pass: a linear layer of few tokens, or the experts of a layer.

The same numbers as `int8`'s plain versions, bit for bit.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from glm5_kernels import int8
from glm5_kernels.compiled.int8_backends import STEP, Matrix
from glm5_kernels.compiled.int8_product import (
    ROWS,
    ZERO_POINT,
    empty_codes,
    has_padding,
    multiply_rows,
    padded_columns,
    padded_tokens,
)
from glm5_kernels.compiled.int8_quantize import QuantizedRows, quantize_rows, quantize_rows_static, scale_row
from glm5_kernels.compiled.jit import inner, kernel
from glm5_kernels.compiled.rows import ELEMENT_BYTES, RowAddress, row_address
from glm5_kernels.compiled.simd import WIDTH
from glm5_kernels.compiled.threads import run_ranges

#: Tasks for each thread, where there are several.
_TASKS_PER_THREAD = 8
_BYTES = np.uint8 if ZERO_POINT else np.int8
_NO_BIAS = np.empty(0, np.int32)


class Groups(NamedTuple):
    """Rows sorted by group: rows int64 [P] of x; starts int64 [E + 1], where the rows of each group begin."""

    rows: NDArray[np.int64]
    starts: NDArray[np.int64]


class Weights(NamedTuple):
    """Row n of group e begins at base + e * group_pitch + n * row_pitch, in bytes; scales: address of fp32 [E, n]."""

    base: int
    group_pitch: int
    row_pitch: int
    n: int
    scales: int


def one_group(tokens: int) -> Groups:
    """All rows of x in one group."""
    return Groups(np.arange(tokens), np.array([0, tokens]))


def takes_weight(weight: torch.Tensor, scale: torch.Tensor) -> bool:
    """True if `grouped_product` takes weight [..., N, K] with scale [..., N]."""
    n, k = weight.shape[-2:]
    whole = not n % WIDTH and weight.stride(-1) == 1 and (not k % STEP or has_padding(weight))
    return whole and weight.dtype == torch.int8 and scale.dtype == torch.float32 and scale.is_contiguous()


def grouped_product(
    x: torch.Tensor,
    groups: Groups,
    weight: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    static: int8.LinearWeights | None = None,
) -> torch.Tensor:
    """x[rows] -> [P, N] in `dtype`: each row in int8, times the weight of its group, scaled back.

    Args:
        x: fp32 or bf16 [T, K], K a multiple of WIDTH.
        weight: int8 [E, N, K], or [N, K] of a single group, as `takes_weight` says. scale: fp32 [E, N].
        static: has the scale and offset of x, and a bias int32 [N]; None: every row of x has a scale of its own.
    """
    (tokens, k), n = x.shape, weight.shape[-2]
    codes, factors = np.full((tokens, padded_columns(k)), ZERO_POINT, _BYTES), np.ones((tokens, 1), np.float32)
    source, bias = row_address(x[None]), _NO_BIAS
    target = QuantizedRows(codes.view(np.int8), k, ZERO_POINT)
    if static is None:
        quantize_rows(0, tokens, source, target, factors)
    else:
        input_scale, offset, added = static.input_scale, static.input_offset, static.quant_bias
        assert input_scale is not None and offset is not None and added is not None
        quantize_rows_static(0, tokens, source, target, np.float32(input_scale.item()), np.float32(offset.item()))
        bias = added.numpy()
    out = torch.empty(len(groups.rows), n, dtype=dtype)
    weights = Weights(weight.data_ptr(), weight.stride(0), weight.stride(-2), n, scale.data_ptr())
    tasks = (len(groups.starts) - 1) * -(-n // ROWS)
    size = -(-tasks // (_TASKS_PER_THREAD * torch.get_num_threads()))
    run_ranges(_multiply_groups, tasks, size, codes, factors, groups, weights, bias, row_address(out[None]))
    return out


@kernel
def _multiply_groups(
    first: int,
    last: int,
    codes: NDArray[np.generic],
    factors: NDArray[np.float32],
    groups: Groups,
    weights: Weights,
    bias: NDArray[np.int32],
    out: RowAddress,
) -> None:
    """Tasks first..last, each ROWS weight rows of a group."""
    n, tasks_per_group, bytes_per_element = weights.n, -(-weights.n // ROWS), ELEMENT_BYTES[out.kind]
    gathered, x, sums = -1, empty_codes(0, STEP), np.empty((0, ROWS), np.int32)
    for task in range(first, last):
        group, low = task // tasks_per_group, task % tasks_per_group * ROWS
        begin, end = groups.starts[group], groups.starts[group + 1]
        if begin == end:
            continue
        if group != gathered:  # one copy of the tokens serves all tasks of the group
            gathered, x = group, _gather(codes, groups.rows, begin, end)
            sums = np.empty((len(x), ROWS), np.int32)
        high = min(low + ROWS, n)
        row = weights.base + weights.group_pitch * group + weights.row_pitch * low
        multiply_rows(x, Matrix(row, weights.row_pitch), 0, high - low, sums)
        for token in range(end - begin):
            for column in range(high - low if len(bias) else 0):
                sums[token, column] += bias[low + column]
            target = out.base + out.row_pitch * (begin + token) + bytes_per_element * low
            scales = weights.scales + 4 * (n * group + low)
            factor = factors[groups.rows[begin + token], 0]
            scale_row(sums[token].ctypes.data, high - low, factor, scales, out.kind, target)


@inner
def _gather(codes: NDArray[np.generic], rows: NDArray[np.int64], begin: int, end: int) -> NDArray[np.generic]:
    """`CODE` [padded tokens, K]: the codes of rows[begin:end]."""
    x: NDArray[np.generic] = empty_codes(padded_tokens(end - begin), codes.shape[1])
    for token in range(end - begin):
        for column in range(codes.shape[1]):  # numba compiles a loop faster than a slice
            x[token, column] = codes[rows[begin + token], column]
    return x
