"""What stands around an int8 product, compiled: a row to int8 and its scale, int32 sums back to floats; one pass each.

The same numbers as `int8`'s plain versions, bit for bit: the same divisions, products and roundings in the same order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import float32, int64, njit, types
from numba.extending import intrinsic

from glm5_kernels import int8
from glm5_kernels.compiled import vnni
from glm5_kernels.compiled.rows import KINDS
from glm5_kernels.compiled.simd import I8, I32, V16, WIDTH, Lanes, count, for_range, load_as_fp32, nothing, store_as
from glm5_kernels.compiled.threads import each

#: What goes in and comes out.
FLOATS = torch.float32, torch.bfloat16
#: Elements of a task.
_ELEMENTS = 2**18
#: int32 sums of a product made before they are scaled back, about what a cache holds; by so many weight rows, because
#: torch's product is slow with fewer.
_SUMS, _ROWS = 2**22, 512
_WORDS, _BYTES = ir.VectorType(I32, WIDTH), ir.VectorType(I8, WIDTH)


def quantize_per_token(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `int8.quantize_per_token`."""
    rows, columns = x.shape
    if not fits(x):
        return int8.quantize_per_token(x)
    out, scale = torch.empty(rows, columns, dtype=torch.int8), torch.empty(rows, 1)
    pitch, kind = x.stride(0) * x.element_size(), KINDS[x.dtype]

    def part(first: int, last: int) -> None:
        quantize_rows(x.data_ptr(), pitch, kind, first, last, out.numpy(), scale.numpy())

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
        quantize_rows_with(x.data_ptr(), pitch, kind, first, last, np.float32(step), np.float32(zero), out.numpy())

    _in_parts(part, rows, columns)
    return out


def scale_back(y: torch.Tensor, x_scale: torch.Tensor | None, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """See `int8.scale_back`."""
    out = torch.empty(y.shape, dtype=dtype)
    _scale_back_to(out, y, x_scale, scale)
    return out


def _scale_back_to(out: torch.Tensor, y: torch.Tensor, x_scale: torch.Tensor | None, scale: torch.Tensor) -> None:
    """`scale_back` to out [T, N], whose rows may lie apart."""
    rows, columns = y.shape
    aligned = y.is_contiguous() and scale.is_contiguous() and scale.dtype == torch.float32 and not columns % WIDTH
    if out.dtype not in FLOATS or not aligned or not rows:
        out.copy_(int8.scale_back(y, x_scale, scale, out.dtype))
        return
    factors = (torch.ones(rows) if x_scale is None else x_scale.reshape(rows)).contiguous().numpy()
    pitch, to_bf16 = out.stride(0) * out.element_size(), int(out.dtype == torch.bfloat16)

    def part(first: int, last: int) -> None:
        _scale(y.data_ptr(), factors, scale.data_ptr(), columns, to_bf16, first, last, out.data_ptr(), pitch)

    _in_parts(part, rows, columns)


#: For `reference` functions that take an `int8.Arithmetic`.
COMPILED = int8.Arithmetic(vnni.matmul, quantize_per_token, quantize_per_tensor, scale_back)


def apply_linear(x: torch.Tensor, w: int8.LinearWeights, dtype: torch.dtype) -> torch.Tensor:
    """See `int8.apply_linear`; of a large product only a part is ever held in int32."""
    if w.quant_mode == int8.NO_QUANT or w.scale is None:
        return int8.apply_linear(x, w, dtype)
    x_q, x_scale = int8.quantize(x, w, dtype, COMPILED)
    out = torch.empty(len(x), len(w.weight), dtype=dtype)
    size = max(_ROWS, _SUMS // max(len(x), 1) // _ROWS * _ROWS)
    for first in range(0, len(w.weight), size):
        part = slice(first, first + size)
        bias = None if w.quant_bias is None else w.quant_bias[part]
        sums = int8.multiply(x_q, w._replace(weight=w.weight[part], quant_bias=bias), COMPILED)
        _scale_back_to(out[:, part], sums, x_scale, w.scale[part])
    return out


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
        with for_range(builder, builder.sdiv(columns, count(WIDTH))) as group:
            x = load_as_fp32(v, row, builder.mul(group, count(WIDTH)), kind)
            builder.store(v.call("maximum", builder.load(peak), v.call("fabs", x)), peak)
        v.store(builder.load(peak), out, count(0))

    return types.void(*[int64] * 4), nothing(generate)


@intrinsic  # type: ignore[untyped-decorator]
def _codes(_: Any, row: Any, columns: Any, kind: Any, scale: Any, offset: Any, out: Any) -> Any:
    """out int8 <- x / scale + offset, rounded to even, saturating, for a row."""

    def generate(builder: Any, arguments: Any) -> None:
        row, columns, kind, scale, offset, out = arguments
        v = Lanes(builder)
        divisor, zero = v.splat(scale), v.splat(offset)
        with for_range(builder, builder.sdiv(columns, count(WIDTH))) as group:
            place = builder.mul(group, count(WIDTH))
            whole = v.call("rint", builder.fadd(builder.fdiv(load_as_fp32(v, row, place, kind), divisor), zero))
            whole = v.call("minnum", v.call("maxnum", whole, v.constant(-128.0)), v.constant(127.0))
            codes = builder.trunc(builder.fptosi(whole, _WORDS), _BYTES)
            builder.store(codes, builder.inttoptr(builder.add(out, place), _BYTES.as_pointer())).align = 1

    return types.void(int64, int64, int64, float32, float32, int64), nothing(generate)


@intrinsic  # type: ignore[untyped-decorator]
def scaled(_: Any, row: Any, columns: Any, factor: Any, scales: Any, to_bf16: Any, out: Any) -> Any:
    """out fp32 or bf16 <- int32 * factor * scales for a row."""

    def generate(builder: Any, arguments: Any) -> None:
        row, columns, factor, scales, to_bf16, out = arguments
        v = Lanes(builder)
        factor = v.splat(factor)
        with for_range(builder, builder.sdiv(columns, count(WIDTH))) as group:
            place = builder.mul(group, count(WIDTH))
            words = builder.bitcast(v.load(row, place), _WORDS)
            x = builder.fmul(builder.fmul(builder.sitofp(words, V16), factor), v.load(scales, place))
            store_as(v, x, out, place, to_bf16)

    return types.void(int64, int64, float32, int64, int64, int64), nothing(generate)


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def quantize_rows(x: Any, pitch: Any, kind: Any, first: Any, last: Any, out: Any, scale: Any) -> None:
    lanes, columns = np.empty(WIDTH, np.float32), out.shape[1]
    for row in range(first, last):
        _largest(x + row * pitch, columns, kind, lanes.ctypes.data)
        highest = float32(1e-8)
        for lane in range(WIDTH):
            if lanes[lane] > highest or lanes[lane] != lanes[lane]:  # a NaN stays
                highest = lanes[lane]
        scale[row, 0] = highest / float32(127)
        _codes(x + row * pitch, columns, kind, scale[row, 0], float32(0), out[row].ctypes.data)


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def quantize_rows_with(x: Any, pitch: Any, kind: Any, first: Any, last: Any, scale: Any, offset: Any, out: Any) -> None:
    for row in range(first, last):
        _codes(x + row * pitch, out.shape[1], kind, scale, offset, out[row].ctypes.data)


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _scale(
    y: Any, factors: Any, scales: Any, columns: Any, to_bf16: Any, first: Any, last: Any, out: Any, pitch: Any
) -> None:
    for row in range(first, last):
        scaled(y + 4 * row * columns, columns, factors[row], scales, to_bf16, out + pitch * row)
