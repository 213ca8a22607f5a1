"""The inner loops of Sparse Flash Attention around its products: the softmax of a row of scores, rows unpacked."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import float32, int64, types
from numba.extending import intrinsic

from glm5_kernels.compiled.simd import (
    I32,
    V16,
    WIDTH,
    Lanes,
    for_range,
    i64_const,
    load_as_fp32,
    returns_value,
    returns_void,
    rounded_to_bf16,
    store_as,
)

_WORDS = ir.VectorType(I32, WIDTH)
#: exp(r) = 1 + r + r^2 p(r) for |r| <= ln(2) / 2; coefficients of Cephes' expf (S. L. Moshier), error below 2 ULP.
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_LOG2_E, _LN2_HIGH, _LN2_LOW = 1.44269504088896341, 0.693359375, -2.12194440e-4
_SMALLEST = -87.0  # exp of less counts as 0


@intrinsic  # type: ignore[untyped-decorator]
def scale_and_peak(_: Any, row: Any, groups: Any, factor: Any) -> Any:
    """row *= factor, and its maximum; a NaN may or may not count."""

    def generate(builder: Any, arguments: Any) -> Any:
        row, groups, factor = arguments
        v = Lanes(builder)
        factor, peak = v.broadcast(factor), v.variable(float("-inf"))
        with for_range(builder, groups) as group:
            offset = builder.mul(group, i64_const(WIDTH))
            x = builder.fmul(v.load(row, offset), factor)
            v.store(x, row, offset)
            builder.store(v.larger(builder.load(peak), x), peak)
        return v.reduce_lanes(v.larger, builder.load(peak))

    return float32(int64, int64, float32), returns_value(generate)


@intrinsic  # type: ignore[untyped-decorator]
def exponentials(_: Any, row: Any, groups: Any, peak: Any, to_bf16: Any) -> Any:
    """row = exp(row - peak), and their sum; then row rounded to bf16 if `to_bf16` is not 0."""

    def generate(builder: Any, arguments: Any) -> Any:
        row, groups, peak, to_bf16 = arguments
        v = Lanes(builder)
        peak, total = v.broadcast(peak), v.variable(0.0)
        with for_range(builder, groups) as group:
            offset = builder.mul(group, i64_const(WIDTH))
            p = exponential(v, builder.fsub(v.load(row, offset), peak))
            builder.store(builder.fadd(builder.load(total), p), total)
            v.store(p, row, offset)
            with builder.if_then(builder.icmp_signed("!=", to_bf16, i64_const(0))):
                v.store(rounded_to_bf16(v, p), row, offset)
        return v.reduce_lanes(builder.fadd, builder.load(total))

    return float32(int64, int64, float32, int64), returns_value(generate)


@intrinsic  # type: ignore[untyped-decorator]
def pair_up(_: Any, row: Any, pairs: Any) -> Any:
    """Each two neighbours of a row of fp32 that are bf16 numbers as one pair, from the row's start on.

    `pairs` is a multiple of 16.
    """

    def generate(builder: Any, arguments: Any) -> None:
        row, pairs = arguments
        v = Lanes(builder)
        with for_range(builder, builder.sdiv(pairs, i64_const(WIDTH))) as group:
            offset = builder.mul(group, i64_const(WIDTH))
            both = [
                v.load(row, builder.add(builder.mul(offset, i64_const(2)), i64_const(side * WIDTH))) for side in (0, 1)
            ]
            even, odd = (
                builder.bitcast(builder.shuffle_vector(*both, ir.Constant(_WORDS, list(range(first, 32, 2)))), _WORDS)
                for first in (0, 1)
            )
            v.store(builder.bitcast(builder.or_(builder.lshr(even, _words(16)), odd), V16), row, offset)

    return types.void(int64, int64), returns_void(generate)


@intrinsic  # type: ignore[untyped-decorator]
def unpacked(_: Any, row: Any, tiles: Any, tile: Any, scales: Any, kind: Any, out: Any) -> Any:
    """out <- bf16(int8 * scale) for `tiles` runs of `tile` int8 at `row`, one fp32 of `scales` each.

    kind: of out, FP32 or BF16.
    """

    def generate(builder: Any, arguments: Any) -> None:
        row, tiles, tile, scales, kind, out = arguments
        v = Lanes(builder)
        with for_range(builder, tiles) as run:
            scale = v.broadcast(v.load_scalar(scales, run))
            with for_range(builder, builder.sdiv(tile, i64_const(WIDTH))) as group:
                offset = builder.add(builder.mul(run, tile), builder.mul(group, i64_const(WIDTH)))
                x = builder.fmul(load_as_fp32(v, row, offset, i64_const(2)), scale)
                store_as(v, rounded_to_bf16(v, x), out, offset, kind)

    return types.void(*[int64] * 6), returns_void(generate)


def exponential(v: Lanes, x: Any) -> Any:
    """exp(x) of each lane; 0 below `_SMALLEST`."""
    builder = v.builder
    gone = builder.fcmp_ordered("<", x, v.constant(_SMALLEST))
    x = v.larger(v.constant(_SMALLEST), x)
    n = v.call("rint", builder.fmul(x, v.constant(_LOG2_E)))
    r = v.call("fmuladd", n, v.constant(-_LN2_HIGH), x)
    r = v.call("fmuladd", n, v.constant(-_LN2_LOW), r)
    p = v.constant(_EXP[0])
    for coefficient in _EXP[1:]:
        p = v.call("fmuladd", p, r, v.constant(coefficient))
    p = v.call("fmuladd", builder.fmul(r, r), p, builder.fadd(r, v.constant(1.0)))
    exponent = builder.shl(builder.add(builder.fptosi(n, _WORDS), _words(127)), _words(23))
    return builder.select(gone, v.constant(0.0), builder.fmul(p, builder.bitcast(exponent, V16)))


def _words(value: int) -> Any:
    return ir.Constant(_WORDS, [value] * WIDTH)
