"""The inner loops of Sparse Flash Attention around its products: softmax of scores, rows unpacked and paired."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import float32

from glm5_kernels.compiled.simd import I16, I32, V16, WIDTH, Lanes, i64_const, intrinsic, shuffled

_PAIR, _WORDS = 2 * WIDTH, ir.VectorType(I32, WIDTH)
_HALVES = ir.VectorType(I16, _PAIR)


@intrinsic()
def copy_and_pair(v: Lanes, even: Any, odd: Any, dims: Any, out: Any, out_pitch: Any, pairs: Any) -> None:
    """Copy two rows of bf16 [dims] to out and out + out_pitch bytes; pairs [dims, 2] <- their columns interleaved.

    `dims` is a multiple of 32.
    """
    builder = v.builder
    orders = [[i // 2 + start + _PAIR * (i % 2) for i in range(_PAIR)] for start in (0, WIDTH)]

    def at(address: Any, offset: Any) -> Any:
        return builder.inttoptr(builder.add(address, offset), _HALVES.as_pointer())

    with v.loop(builder.sdiv(dims, i64_const(_PAIR))) as group:
        offset = builder.mul(group, i64_const(2 * _PAIR))
        rows = [builder.load(at(row, offset)) for row in (even, odd)]
        for row, target in zip(rows, (out, builder.add(out, out_pitch)), strict=True):
            row.align = 2
            builder.store(row, at(target, offset)).align = 2
        for number, order in enumerate(orders):
            both = shuffled(builder, rows[0], rows[1], order)
            target = builder.add(builder.mul(offset, i64_const(2)), i64_const(2 * _PAIR * number))
            builder.store(both, at(pairs, target)).align = 2


@intrinsic(scale=float32)
def softmax_columns(
    v: Lanes, scores: Any, pitch: Any, keys: Any, pairs: Any, scale: Any, parts: Any, peak: Any, total: Any, factor: Any
) -> None:
    """Sixteen columns of scores fp32 [2 * pairs, pitch], of which `keys` rows count -> unnormalised probabilities.

    Row 2 i gets those of rows 2 i and 2 i + 1 as a pair of bf16; with `parts` of 2, row 2 i + 1 gets their rounding
    errors.
    Peak, total and factor are the online softmax's maximum, sum, and factor of the earlier sum.
    """
    builder = v.builder
    zero = i64_const(0)
    scale, before, double = v.broadcast(scale), v.load(peak, zero), builder.mul(pitch, i64_const(2))
    best, added = v.variable(0.0), v.variable(0.0)
    builder.store(before, best)
    with v.loop(keys) as key:
        offset = builder.mul(key, pitch)
        x = builder.fmul(v.load(scores, offset), scale)
        v.store(x, scores, offset)
        builder.store(v.larger(builder.load(best), x), best)
    with v.loop(builder.sub(builder.mul(pairs, i64_const(2)), keys)) as key:  # no weight
        v.store(v.constant(float("-inf")), scores, builder.mul(builder.add(keys, key), pitch))
    highest = builder.load(best)
    with v.loop(pairs) as pair:
        offsets = [builder.add(builder.mul(pair, double), offset) for offset in (zero, pitch)]
        p = [exponential(v, builder.fsub(v.load(scores, offset), highest)) for offset in offsets]
        for x in p:
            builder.store(builder.fadd(builder.load(added), x), added)
        rounded = [v.rounded_to_bf16(x) for x in p]
        v.store(v.joined(*rounded), scores, offsets[0])
        with builder.if_then(builder.icmp_signed("==", parts, i64_const(2))):
            left = [v.rounded_to_bf16(builder.fsub(x, y)) for x, y in zip(p, rounded, strict=True)]
            v.store(v.joined(*left), scores, offsets[1])
    shrunk = exponential(v, builder.fsub(before, highest))
    v.store(builder.fadd(builder.fmul(v.load(total, zero), shrunk), builder.load(added)), total, zero)
    v.store(highest, peak, zero)
    v.store(shrunk, factor, zero)


#: exp(r) = 1 + r + r^2 p(r) for |r| <= ln(2) / 2; coefficients of Cephes' expf (S. L. Moshier), error below 2 ULP.
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_LOG2_E, _LN2_HIGH, _LN2_LOW = 1.44269504088896341, 0.693359375, -2.12194440e-4
_SMALLEST = -87.0  # exp of less counts as 0


@intrinsic(returns=float32, factor=float32)
def scale_and_peak(v: Lanes, row: Any, groups: Any, factor: Any) -> Any:
    """row *= factor, and its maximum; a NaN may or may not count."""
    builder = v.builder
    factor, peak = v.broadcast(factor), v.variable(float("-inf"))
    with v.lane_groups(groups) as offset:
        x = builder.fmul(v.load(row, offset), factor)
        v.store(x, row, offset)
        builder.store(v.larger(builder.load(peak), x), peak)
    return v.reduce_lanes(v.larger, builder.load(peak))


@intrinsic(returns=float32, peak=float32)
def exponentials(v: Lanes, row: Any, groups: Any, peak: Any, to_bf16: Any) -> Any:
    """row = exp(row - peak), and their sum; then row rounded to bf16 if `to_bf16` is not 0."""
    builder = v.builder
    peak, total = v.broadcast(peak), v.variable(0.0)
    with v.lane_groups(groups) as offset:
        p = exponential(v, builder.fsub(v.load(row, offset), peak))
        builder.store(builder.fadd(builder.load(total), p), total)
        v.store(p, row, offset)
        with builder.if_then(builder.icmp_signed("!=", to_bf16, i64_const(0))):
            v.store(v.rounded_to_bf16(p), row, offset)
    return v.reduce_lanes(builder.fadd, builder.load(total))


@intrinsic()
def pair_up(v: Lanes, row: Any, pairs: Any) -> None:
    """Each two neighbours of a row of fp32 that are bf16 numbers as one pair, from the row's start on.

    `pairs` is a multiple of 16.
    """
    builder = v.builder
    with v.lane_groups(builder.sdiv(pairs, i64_const(WIDTH))) as offset:
        both = [v.load(row, builder.add(builder.mul(offset, i64_const(2)), i64_const(side * WIDTH))) for side in (0, 1)]
        even, odd = (shuffled(builder, both[0], both[1], list(range(first, 2 * WIDTH, 2))) for first in (0, 1))
        v.store(v.joined(even, odd), row, offset)


@intrinsic()
def unpacked(v: Lanes, row: Any, tiles: Any, tile: Any, scales: Any, kind: Any, out: Any) -> None:
    """out <- bf16(int8 * scale) for `tiles` runs of `tile` int8 at `row`, one fp32 of `scales` each.

    kind: of out, FP32 or BF16.
    """
    builder = v.builder
    with v.loop(tiles) as run:
        scale = v.broadcast(v.load_scalar(scales, run))
        with v.loop(builder.sdiv(tile, i64_const(WIDTH))) as group:
            offset = builder.add(builder.mul(run, tile), builder.mul(group, i64_const(WIDTH)))
            x = builder.fmul(v.load_as_fp32(row, offset, i64_const(2)), scale)
            v.store_as(v.rounded_to_bf16(x), out, offset, kind)


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
