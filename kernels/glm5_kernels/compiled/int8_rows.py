"""What stands around an int8 product, compiled: a row to int8 and its scale, int32 sums back to floats; one pass each.

The same numbers as `int8`'s plain versions, bit for bit: the same divisions, products and roundings in the same order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import float32, int64, types
from numba.extending import intrinsic

from glm5_kernels import int8
from glm5_kernels.compiled import int8_dots
from glm5_kernels.compiled.jit import kernel
from glm5_kernels.compiled.rows import KINDS, RowAddress
from glm5_kernels.compiled.simd import (
    I8,
    I32,
    V16,
    WIDTH,
    Lanes,
    for_range,
    i64_const,
    load_as_fp32,
    returns_void,
    store_as,
)
from glm5_kernels.compiled.threads import each

#: What goes in and comes out.
FLOATS = torch.float32, torch.bfloat16
#: Elements of a task.
_ELEMENTS = 2**18
_WORDS, _BYTES = ir.VectorType(I32, WIDTH), ir.VectorType(I8, WIDTH)


class Sums(NamedTuple):
    """int32 [T, N] at `base` and what scales them back: factors fp32 [T] of tokens, scales fp32 [N] (an address)."""

    base: int
    columns: int
    factors: Any
    scales: int


def quantize_per_token(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `int8.quantize_per_token`."""
    rows, columns = x.shape
    if not fits(x):
        return int8.quantize_per_token(x)
    out, scale = torch.empty(rows, columns, dtype=torch.int8), torch.empty(rows, 1)
    pitch, kind = x.stride(0) * x.element_size(), KINDS[x.dtype]

    def part(first: int, last: int) -> None:
        quantize_rows(x.data_ptr(), pitch, kind, first, last, columns, 0, out.numpy(), scale.numpy())

    _in_parts(part, rows, columns)
    return out, scale


def quantize_per_tensor(x: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """See `int8.quantize_per_tensor`."""
    rows, columns = x.shape
    if not fits(x):
        return int8.quantize_per_tensor(x, scale, offset)
    out = torch.empty(rows, columns, dtype=torch.int8)
    pitch, kind, step, zero = x.stride(0) * x.element_size(), KINDS[x.dtype], float(scale), float(offset)

    def part(first: int, last: int) -> None:
        given = x.data_ptr(), pitch, kind, first, last, columns, 0
        quantize_rows_with(*given, np.float32(step), np.float32(zero), out.numpy())

    _in_parts(part, rows, columns)
    return out


def scale_back(y: torch.Tensor, x_scale: torch.Tensor | None, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """See `int8.scale_back`."""
    out = torch.empty(y.shape, dtype=dtype)
    scale_back_to(out, y, x_scale, scale)
    return out


def scale_back_to(out: torch.Tensor, y: torch.Tensor, x_scale: torch.Tensor | None, scale: torch.Tensor) -> None:
    """`scale_back` to out [T, N], whose rows may lie apart."""
    rows, columns = y.shape
    aligned = y.is_contiguous() and scale.is_contiguous() and scale.dtype == torch.float32 and not columns % WIDTH
    if out.dtype not in FLOATS or not aligned or not rows:
        out.copy_(int8.scale_back(y, x_scale, scale, out.dtype))
        return
    factors = (torch.ones(rows) if x_scale is None else x_scale.reshape(rows)).contiguous().numpy()
    sums = Sums(y.data_ptr(), columns, factors, scale.data_ptr())
    target = RowAddress(out.data_ptr(), 0, out.stride(0) * out.element_size(), KINDS[out.dtype])

    def part(first: int, last: int) -> None:
        _scale_rows(sums, first, last, target)

    _in_parts(part, rows, columns)


#: For `reference` functions that take an `int8.Arithmetic`.
COMPILED = int8.Arithmetic(int8_dots.matmul, quantize_per_token, quantize_per_tensor, scale_back)


def fits(x: torch.Tensor) -> bool:
    """Whether the compiled functions take x [T, K]."""
    rows, columns = x.shape
    return x.dtype in FLOATS and x.stride(-1) == 1 and not columns % WIDTH and rows > 0


def _in_parts(part: Any, rows: int, columns: int) -> None:
    size = max(1, _ELEMENTS // columns)
    each(lambda number: part(number * size, min((number + 1) * size, rows)), -(-rows // size))


@intrinsic  # type: ignore[untyped-decorator]
def _largest(_: Any, row: Any, columns: Any, kind: Any, out: Any) -> Any:
    """Lanes of max |x| of a row to out[0:16]; NaN if one is."""

    def generate(builder: Any, arguments: Any) -> None:
        row, columns, kind, out = arguments
        v = Lanes(builder)
        peak = v.variable(0.0)
        with for_range(builder, builder.sdiv(columns, i64_const(WIDTH))) as group:
            x = load_as_fp32(v, row, builder.mul(group, i64_const(WIDTH)), kind)
            builder.store(v.call("maximum", builder.load(peak), v.call("fabs", x)), peak)
        v.store(builder.load(peak), out, i64_const(0))

    return types.void(*[int64] * 4), returns_void(generate)


@intrinsic  # type: ignore[untyped-decorator]
def _codes(_: Any, row: Any, columns: Any, kind: Any, scale: Any, offset: Any, flip: Any, out: Any) -> Any:
    """out int8 <- x / scale + offset, rounded to even, saturating, 0 where it is NaN, for a row; xor `flip`, a byte."""

    def generate(builder: Any, arguments: Any) -> None:
        row, columns, kind, scale, offset, flip, out = arguments
        v = Lanes(builder)
        divisor, zero = v.broadcast(scale), v.broadcast(offset)
        flips = v.broadcast(builder.trunc(flip, I8))
        with for_range(builder, builder.sdiv(columns, i64_const(WIDTH))) as group:
            place = builder.mul(group, i64_const(WIDTH))
            whole = v.call("rint", builder.fadd(builder.fdiv(load_as_fp32(v, row, place, kind), divisor), zero))
            whole = builder.select(builder.fcmp_unordered("uno", whole, whole), v.constant(0.0), whole)
            whole = v.call("minnum", v.call("maxnum", whole, v.constant(-128.0)), v.constant(127.0))
            codes = builder.xor(builder.trunc(builder.fptosi(whole, _WORDS), _BYTES), flips)
            builder.store(codes, builder.inttoptr(builder.add(out, place), _BYTES.as_pointer())).align = 1

    return types.void(int64, int64, int64, float32, float32, int64, int64), returns_void(generate)


@intrinsic  # type: ignore[untyped-decorator]
def scale_row(_: Any, row: Any, columns: Any, factor: Any, scales: Any, kind: Any, out: Any) -> Any:
    """out [columns], FP32 or BF16 as `kind` says, <- row int32 [columns] * factor * scales fp32 [columns]."""

    def generate(builder: Any, arguments: Any) -> None:
        row, columns, factor, scales, kind, out = arguments
        v = Lanes(builder)
        factor = v.broadcast(factor)
        with for_range(builder, builder.sdiv(columns, i64_const(WIDTH))) as group:
            place = builder.mul(group, i64_const(WIDTH))
            words = builder.bitcast(v.load(row, place), _WORDS)
            x = builder.fmul(builder.fmul(builder.sitofp(words, V16), factor), v.load(scales, place))
            store_as(v, x, out, place, kind)

    return types.void(int64, int64, float32, int64, int64, int64), returns_void(generate)


@kernel
def quantize_rows(
    x: Any, pitch: Any, kind: Any, first: Any, last: Any, columns: Any, flip: Any, out: Any, scale: Any
) -> None:
    """out int8 [T, >= columns] and scale fp32 [T, 1] = max|row| / 127, of tokens first..last.

    x: address of T rows of so many columns of `kind`, `pitch` bytes apart. flip: what every code is xored with.
    """
    lanes = np.empty(WIDTH, np.float32)
    for row in range(first, last):
        _largest(x + row * pitch, columns, kind, lanes.ctypes.data)
        highest = float32(1e-8)
        for lane in range(WIDTH):
            if lanes[lane] > highest or lanes[lane] != lanes[lane]:  # a NaN stays
                highest = lanes[lane]
        scale[row, 0] = highest / float32(127) if highest < float32(np.inf) else float32(np.nan)
        _codes(x + row * pitch, columns, kind, scale[row, 0], float32(0), flip, out[row].ctypes.data)


@kernel
def quantize_rows_with(
    x: Any, pitch: Any, kind: Any, first: Any, last: Any, columns: Any, flip: Any, scale: Any, offset: Any, out: Any
) -> None:
    """out int8 [T, >= columns] <- x / scale + offset of tokens first..last; the rest as for `quantize_rows`."""
    for row in range(first, last):
        _codes(x + row * pitch, columns, kind, scale, offset, flip, out[row].ctypes.data)


@kernel
def _scale_rows(sums: Any, first: Any, last: Any, out: Any) -> None:
    """Rows first..last of out, FP32 or BF16 (`scale_row`)."""
    for row in range(first, last):
        source, target = sums.base + 4 * row * sums.columns, out.base + row * out.row_pitch
        scale_row(source, sums.columns, sums.factors[row], sums.scales, out.kind, target)
