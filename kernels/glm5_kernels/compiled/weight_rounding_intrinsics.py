"""The loops over a row of weights, sixteen at a time; the caller handles the rest of a row.

Addresses are int64, counts are in groups of sixteen (of 64 for `refit_sums`). A sum comes back as its lanes, so that
the caller adds them up in one order.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import float32, int64, types
from numba.extending import intrinsic

from glm5_kernels.compiled.simd import I8, I32, WIDTH, Lanes, for_range, i64_const, returns_void

UNROLL = 4
_INTEGERS, _BYTES = ir.VectorType(I32, WIDTH), ir.VectorType(I8, WIDTH)


def _rounded(v: Lanes, scaled: Any, low: Any, high: Any) -> Any:
    return v.call("minnum", v.call("maxnum", v.call("rint", scaled), low), high)


@intrinsic  # type: ignore[untyped-decorator]
def refit_sums(_: Any, row: Any, groups: Any, inverse: Any, low: Any, high: Any, out: Any) -> Any:
    """Lanes of sum(w q) to out[0:64], of sum(q^2) to out[64:128], for q = round(w * inverse).

    No lane adds more than K / 64 terms, so sums of squared INT8 integers stay exact for any real row.
    """

    def generate(builder: Any, arguments: Any) -> None:
        row, groups, inverse, low, high, out = arguments
        v = Lanes(builder)
        inverse, low, high = v.broadcast(inverse), v.broadcast(low), v.broadcast(high)
        along, energy = ([v.variable(0.0) for _ in range(UNROLL)] for _ in range(2))
        with for_range(builder, groups) as group:
            start = builder.mul(group, i64_const(WIDTH * UNROLL))
            for k in range(UNROLL):
                w = v.load(row, builder.add(start, i64_const(WIDTH * k)))
                q = _rounded(v, builder.fmul(w, inverse), low, high)
                builder.store(v.call("fmuladd", w, q, builder.load(along[k])), along[k])
                builder.store(v.call("fmuladd", q, q, builder.load(energy[k])), energy[k])
        for number, total in enumerate([*along, *energy]):
            v.store(builder.load(total), out, i64_const(WIDTH * number))

    return types.void(int64, int64, float32, float32, float32, int64), returns_void(generate)


@intrinsic  # type: ignore[untyped-decorator]
def scaled_peak(_: Any, row: Any, groups: Any, factor: Any, target: Any, out: Any) -> Any:
    """target = row * factor (both addresses; factor 0: not at all), lanes of max|target| to out[0:16]."""

    def generate(builder: Any, arguments: Any) -> None:
        row, groups, factor, target, out = arguments
        v = Lanes(builder)
        peak = v.variable(0.0)
        with builder.if_else(builder.icmp_signed("==", factor, i64_const(0))) as (plain, scaled):
            with plain, for_range(builder, groups) as group:
                w = v.load(row, builder.mul(group, i64_const(WIDTH)))
                builder.store(v.call("maxnum", builder.load(peak), v.call("fabs", w)), peak)
            with scaled, for_range(builder, groups) as group:
                index = builder.mul(group, i64_const(WIDTH))
                w = builder.fmul(v.load(row, index), v.load(factor, index))
                v.store(w, target, index)
                builder.store(v.call("maxnum", builder.load(peak), v.call("fabs", w)), peak)
        v.store(builder.load(peak), out, i64_const(0))

    return types.void(int64, int64, int64, int64, int64), returns_void(generate)


@intrinsic  # type: ignore[untyped-decorator]
def fake_rounded(_: Any, row: Any, groups: Any, scale: Any, low: Any, high: Any) -> Any:
    """row = round(row / scale) * scale, in place."""

    def generate(builder: Any, arguments: Any) -> None:
        row, groups, scale, low, high = arguments
        v = Lanes(builder)
        scale, low, high = v.broadcast(scale), v.broadcast(low), v.broadcast(high)
        with for_range(builder, groups) as group:
            index = builder.mul(group, i64_const(WIDTH))
            q = _rounded(v, builder.fdiv(v.load(row, index), scale), low, high)
            v.store(builder.fmul(q, scale), row, index)

    return types.void(int64, int64, float32, float32, float32), returns_void(generate)


@intrinsic  # type: ignore[untyped-decorator]
def rounded_bytes(
    _: Any, row: Any, groups: Any, scale: Any, low: Any, high: Any, shift: Any, out: Any, sums: Any
) -> Any:
    """Integers to the bytes at `out`; lanes of sum(q), of the squared error and of the squared weight to sums[0:48].

    shift -1: whole bytes; 0: the low nibble, the rest zero; 4: the high nibble, the low one stays.
    """

    def generate(builder: Any, arguments: Any) -> None:
        row, groups, scale, low, high, shift, out, sums = arguments
        v = Lanes(builder)
        scale, low, high = v.broadcast(scale), v.broadcast(low), v.broadcast(high)
        total, error, square = (v.variable(0.0) for _ in range(3))
        with for_range(builder, groups) as group:
            start = builder.mul(group, i64_const(WIDTH))
            w = v.load(row, start)
            q = _rounded(v, builder.fdiv(w, scale), low, high)
            miss = builder.fsub(builder.fmul(q, scale), w)
            builder.store(builder.fadd(builder.load(total), q), total)
            builder.store(v.call("fmuladd", miss, miss, builder.load(error)), error)
            builder.store(v.call("fmuladd", w, w, builder.load(square)), square)
            target = builder.inttoptr(builder.add(out, start), _BYTES.as_pointer())
            _store_bytes(builder, builder.fptosi(q, _INTEGERS), shift, target)
        for number, lanes in enumerate((total, error, square)):
            v.store(builder.load(lanes), sums, i64_const(WIDTH * number))

    return types.void(int64, int64, float32, float32, float32, int64, int64, int64), returns_void(generate)


def _store_bytes(builder: Any, integers: Any, shift: Any, target: Any) -> None:
    def store(value: Any) -> None:
        builder.store(builder.trunc(value, _BYTES), target).align = 1

    with builder.if_else(builder.icmp_signed("<", shift, i64_const(0))) as (whole, nibble):
        with whole:
            store(integers)
        with nibble, builder.if_else(builder.icmp_signed("==", shift, i64_const(0))) as (first, second):
            with first:
                store(builder.and_(integers, ir.Constant(_INTEGERS, [15] * WIDTH)))
            with second:
                low_nibbles = builder.load(target)
                low_nibbles.align = 1
                moved = builder.shl(integers, ir.Constant(_INTEGERS, [4] * WIDTH))
                store(builder.or_(moved, builder.zext(low_nibbles, _INTEGERS)))
