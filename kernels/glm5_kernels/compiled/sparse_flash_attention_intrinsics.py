"""The inner loops of Sparse Flash Attention around its products: the softmax of a row of scores, rows unpacked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import float32, int64, types
from numba.extending import intrinsic

from glm5_kernels.compiled.simd import (
    FEWER,
    GROUPS,
    I32,
    I64,
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
    sum_each,
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


def _dots(add: Callable[..., Any]) -> Any:
    """The intrinsic out[h, 0:FEWER] <- query[h] . key of FEWER heads and keys, a lane for every sixteenth column.

    rows, more_rows: addresses of the addresses of the keys' two parts, of dims and more_dims elements of `kind`, one
    after the other in a query. Where `add` is `Lanes.add_pairs` an element is two bf16 and `kind` FP32.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def dots(
        _: Any, rows: Any, dims: Any, more_rows: Any, more_dims: Any, kind: Any, query: Any, out: Any, out_pitch: Any
    ) -> Any:
        def generate(builder: Any, arguments: Any) -> None:
            rows, dims, more_rows, more_dims, kind, query, out, out_pitch = arguments
            v, pitch = Lanes(builder), builder.add(dims, more_dims)
            sums = [[v.variable(0.0) for _ in range(FEWER)] for _ in range(FEWER)]
            for table, size, skipped in ((rows, dims, i64_const(0)), (more_rows, more_dims, dims)):
                starts = builder.inttoptr(table, I64.as_pointer())
                keys = [builder.load(builder.gep(starts, [i64_const(key)])) for key in range(FEWER)]
                with for_range(builder, builder.sdiv(size, i64_const(WIDTH))) as group:
                    offset = builder.mul(group, i64_const(WIDTH))
                    columns = [load_as_fp32(v, key, offset, kind) for key in keys]
                    for head, row in enumerate(sums):
                        start = builder.add(builder.mul(pitch, i64_const(head)), builder.add(skipped, offset))
                        element = v.load(query, start)
                        for total, column in zip(row, columns, strict=True):
                            builder.store(add(v, element, column, builder.load(total)), total)
            for head, row in enumerate(sums):
                whole = sum_each(v, [builder.load(total) for total in row])
                target = builder.add(out, builder.mul(builder.mul(out_pitch, i64_const(head)), i64_const(4)))
                builder.store(whole, builder.inttoptr(target, whole.type.as_pointer())).align = 4

        return types.void(*[int64] * 8), returns_void(generate)

    return dots


dots, dots_of_pairs = _dots(Lanes.add_products), _dots(Lanes.add_pairs)


@intrinsic  # type: ignore[untyped-decorator]
def accumulate_rows(
    _: Any, rows: Any, count: Any, skipped: Any, kind: Any, left: Any, left_pitch: Any, out: Any, out_pitch: Any
) -> Any:
    """`accumulate` for FEWER heads and a matrix of `count` scattered rows, in order.

    rows: address of their addresses; 2 STEP elements of `kind` are used, `skipped` bytes after the start of each.
    """

    def generate(builder: Any, arguments: Any) -> None:
        rows, count, skipped, kind, left, left_pitch, out, out_pitch = arguments
        v, table = Lanes(builder), builder.inttoptr(rows, I64.as_pointer())
        sums = [[v.variable(0.0) for _ in range(2 * GROUPS)] for _ in range(FEWER)]
        starts = [builder.mul(out_pitch, i64_const(head)) for head in range(FEWER)]
        for start, row in zip(starts, sums, strict=True):
            for g, total in enumerate(row):
                builder.store(v.load(out, builder.add(start, i64_const(WIDTH * g))), total)
        with for_range(builder, count) as k:
            source = builder.add(builder.load(builder.gep(table, [k])), skipped)
            columns = [load_as_fp32(v, source, i64_const(WIDTH * g), kind) for g in range(2 * GROUPS)]
            for head, row in enumerate(sums):
                factor = v.broadcast(v.load_scalar(left, builder.add(builder.mul(left_pitch, i64_const(head)), k)))
                for total, column in zip(row, columns, strict=True):
                    builder.store(v.add_products(factor, column, builder.load(total)), total)
        for start, row in zip(starts, sums, strict=True):
            for g, total in enumerate(row):
                v.store(builder.load(total), out, builder.add(start, i64_const(WIDTH * g)))

    return types.void(*[int64] * 8), returns_void(generate)


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
