"""Rows to int8 and their scales, and int32 sums back to floats, compiled: one pass each.

The same numbers as `int8`'s plain versions, bit for bit: the same divisions, products and roundings in the same order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import float32, types
from numba.core import cgutils
from numpy.typing import NDArray

from glm5_kernels import int8
from glm5_kernels.compiled.jit import kernel
from glm5_kernels.compiled.rows import RowAddress, matrix_address
from glm5_kernels.compiled.simd import I8, I32, I64, V16, WIDTH, Lanes, call_llvm, i64_const, intrinsic
from glm5_kernels.compiled.threads import run_ranges

#: Types of rows that go in and come out.
FLOATS = torch.float32, torch.bfloat16
#: Elements of a task.
_ELEMENTS = 2**18
_INT32, _BYTES = ir.VectorType(I32, WIDTH), ir.VectorType(I8, WIDTH)


class Sums(NamedTuple):
    """int32 [T, columns] at `base`; factors fp32 [T] of the tokens; scales: address of fp32 [columns]."""

    base: int
    columns: int
    factors: NDArray[np.float32]
    scales: int


class QuantizedRows(NamedTuple):
    """codes int8 [T, >= columns]."""

    codes: NDArray[np.int8]
    columns: int


def quantize(x: torch.Tensor, w: int8.LinearWeights) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`int8.quantize` for int8 weights."""
    if w.quant_mode == int8.PER_TOKEN:
        return quantize_per_token(x)
    assert w.input_scale is not None and w.input_offset is not None
    return quantize_per_tensor(x, w.input_scale, w.input_offset), None


def quantize_per_token(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `int8.quantize_per_token`."""
    rows, columns = x.shape
    if not takes_rows(x):
        return int8.quantize_per_token(x)
    codes, scale = torch.empty(rows, columns, dtype=torch.int8), torch.empty(rows, 1)
    target = QuantizedRows(codes.numpy(), columns)
    run_ranges(quantize_rows, rows, rows_per_task(columns), matrix_address(x), target, scale.numpy())
    return codes, scale


def quantize_per_tensor(x: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """See `int8.quantize_per_tensor`."""
    rows, columns = x.shape
    if not takes_rows(x):
        return int8.quantize_per_tensor(x, scale, offset)
    codes = torch.empty(rows, columns, dtype=torch.int8)
    source, target = matrix_address(x), QuantizedRows(codes.numpy(), columns)
    run_ranges(quantize_rows_static, rows, rows_per_task(columns), source, target, *numbers(scale, offset))
    return codes


def numbers(*weights: torch.Tensor) -> list[np.float32]:
    """The numbers of weights [1], without an operator of torch: they are the same in every step."""
    return [np.float32(weight.float().numpy()[0]) for weight in weights]


def scale_back_to(out: torch.Tensor, y: torch.Tensor, x_scale: torch.Tensor | None, scale: torch.Tensor) -> None:
    """`int8.scale_back` to out [T, N], whose rows may have gaps between them."""
    rows, columns = y.shape
    aligned = y.is_contiguous() and scale.is_contiguous() and scale.dtype == torch.float32 and not columns % WIDTH
    if out.dtype not in FLOATS or not aligned or not rows:
        out.copy_(int8.scale_back(y, x_scale, scale, out.dtype))
        return
    factors = (torch.ones(rows) if x_scale is None else x_scale.reshape(rows)).contiguous().numpy()
    sums = Sums(y.data_ptr(), columns, factors, scale.data_ptr())
    run_ranges(_scale_rows, rows, rows_per_task(columns), sums, matrix_address(out))


def takes_rows(x: torch.Tensor) -> bool:
    """True if the compiled functions take x [T, K]."""
    rows, columns = x.shape
    return x.dtype in FLOATS and x.stride(-1) == 1 and not columns % WIDTH and rows > 0


def rows_per_task(columns: int) -> int:
    """Rows of a task of `quantize_rows`."""
    return max(1, _ELEMENTS // columns)


@intrinsic()
def _largest(v: Lanes, row: Any, columns: Any, kind: Any, out: Any) -> None:
    """out[0:16] <- lanes of max |x| of a row; NaN if an element is."""
    builder = v.builder
    peak = v.variable(0.0)
    with v.loop(builder.sdiv(columns, i64_const(WIDTH))) as group:
        x = v.load_as_fp32(row, builder.mul(group, i64_const(WIDTH)), kind)
        builder.store(v.call("maximum", builder.load(peak), v.call("fabs", x)), peak)
    v.store(builder.load(peak), out, i64_const(0))


@intrinsic(scale=float32, offset=float32)
def _codes(v: Lanes, row: Any, columns: Any, kind: Any, scale: Any, offset: Any, out: Any) -> None:
    """out int8 <- x / scale + offset of a row, rounded to even, saturating, 0 for NaN."""
    builder = v.builder
    divisor, zero = v.broadcast(scale), v.broadcast(offset)
    with v.lane_groups(builder.sdiv(columns, i64_const(WIDTH))) as index:
        whole = v.call("rint", builder.fadd(builder.fdiv(v.load_as_fp32(row, index, kind), divisor), zero))
        whole = builder.select(builder.fcmp_unordered("uno", whole, whole), v.constant(0.0), whole)
        whole = v.call("minnum", v.call("maxnum", whole, v.constant(-128.0)), v.constant(127.0))
        codes = builder.trunc(builder.fptosi(whole, _INT32), _BYTES)
        builder.store(codes, builder.inttoptr(builder.add(out, index), _BYTES.as_pointer())).align = 1


@intrinsic(factor=float32)
def scale_row(
    v: Lanes, row: Any, columns: Any, start: Any, bias: Any, factor: Any, scales: Any, kind: Any, out: Any
) -> None:
    """out [columns], FP32 or BF16 as `kind` says, <- (row + start + bias) * factor * scales fp32 [columns].

    row and bias are int32 [columns]; no bias if that address is 0.
    """
    builder = v.builder
    factor, start = v.broadcast(factor), v.broadcast(builder.trunc(start, I32))
    has_bias = builder.icmp_signed("!=", bias, i64_const(0))
    integers = cgutils.alloca_once(builder, _INT32)
    with v.lane_groups(builder.sdiv(columns, i64_const(WIDTH))) as index:
        builder.store(builder.add(builder.bitcast(v.load(row, index), _INT32), start), integers)
        with builder.if_then(has_bias):
            added = builder.bitcast(v.load(bias, index), _INT32)
            builder.store(builder.add(builder.load(integers), added), integers)
        x = builder.fmul(builder.sitofp(builder.load(integers), V16), factor)
        v.store_as(builder.fmul(x, v.load(scales, index)), out, index, kind)


@intrinsic(types.int64)
def copied_sum(v: Lanes, codes: Any, columns: Any, out: Any) -> Any:
    """The sum of a row of int8 codes, whole lanes of them, which out becomes a copy of."""
    builder = v.builder
    total = cgutils.alloca_once(builder, _INT32)
    builder.store(ir.Constant(_INT32, [0] * WIDTH), total)
    with v.lane_groups(builder.sdiv(columns, i64_const(WIDTH))) as index:
        source, target = (builder.inttoptr(builder.add(row, index), _BYTES.as_pointer()) for row in (codes, out))
        lanes = builder.load(source)
        lanes.align = 1
        builder.store(lanes, target).align = 1
        builder.store(builder.add(builder.load(total), builder.sext(lanes, _INT32)), total)
    return builder.sext(call_llvm(builder, I32, "vector.reduce.add.v16i32", builder.load(total)), I64)


@kernel
def quantize_rows(first: int, last: int, x: RowAddress, out: QuantizedRows, scale: NDArray[np.float32]) -> None:
    """out and scale fp32 [T, 1] = max|row| / 127 <- tokens first..last of x."""
    lanes = np.empty(WIDTH, np.float32)
    for row in range(first, last):
        source = x.base + row * x.row_pitch
        _largest(source, out.columns, x.kind, lanes.ctypes.data)
        peak = float32(1e-8)
        for lane in range(WIDTH):
            if lanes[lane] > peak or lanes[lane] != lanes[lane]:  # a NaN stays
                peak = lanes[lane]
        scale[row, 0] = peak / float32(127) if peak < float32(np.inf) else float32(np.nan)
        _codes(source, out.columns, x.kind, scale[row, 0], float32(0), out.codes[row].ctypes.data)


@kernel
def quantize_rows_static(
    first: int, last: int, x: RowAddress, out: QuantizedRows, scale: np.float32, offset: np.float32
) -> None:
    """out <- x / scale + offset, tokens first..last."""
    for row in range(first, last):
        source = x.base + row * x.row_pitch
        _codes(source, out.columns, x.kind, scale, offset, out.codes[row].ctypes.data)


@kernel
def _scale_rows(first: int, last: int, sums: Sums, out: RowAddress) -> None:
    """Rows first..last of out <- sums."""
    for row in range(first, last):
        source, target = sums.base + 4 * row * sums.columns, out.base + row * out.row_pitch
        scale_row(source, sums.columns, 0, 0, sums.factors[row], sums.scales, out.kind, target)
