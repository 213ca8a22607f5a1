"""Weight rounding compiled: a row stays in the nearest cache for all that is done to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import float32, float64, int8, int64

from glm5_kernels.compiled.jit import inner, kernel
from glm5_kernels.compiled.simd import I8, I32, WIDTH, Lanes, i64_const, intrinsic
from glm5_kernels.weight_rounding import FakeRound, RoundRows, SszScale
from glm5_kernels.weight_rounding.reference import NOISE

UNROLL = 4
_INTEGERS, _BYTES = ir.VectorType(I32, WIDTH), ir.VectorType(I8, WIDTH)


def _rounded(v: Lanes, scaled: Any, low: Any, high: Any) -> Any:
    return v.call("minnum", v.call("maxnum", v.call("rint", scaled), low), high)


@intrinsic(inverse=float32, low=float32, high=float32)
def refit_sums(v: Lanes, row: Any, groups: Any, inverse: Any, low: Any, high: Any, out: Any) -> None:
    """Lanes of sum(w q) to out[0:64], of sum(q^2) to out[64:128], for q = round(w * inverse).

    No lane adds more than K / 64 terms, so sums of squared INT8 integers stay exact for any real row.
    """
    builder = v.builder
    inverse, low, high = v.broadcast(inverse), v.broadcast(low), v.broadcast(high)
    along, energy = ([v.variable(0.0) for _ in range(UNROLL)] for _ in range(2))
    with v.loop(groups) as group:
        start = builder.mul(group, i64_const(WIDTH * UNROLL))
        for k in range(UNROLL):
            w = v.load(row, builder.add(start, i64_const(WIDTH * k)))
            q = _rounded(v, builder.fmul(w, inverse), low, high)
            builder.store(v.call("fmuladd", w, q, builder.load(along[k])), along[k])
            builder.store(v.call("fmuladd", q, q, builder.load(energy[k])), energy[k])
    for number, total in enumerate([*along, *energy]):
        v.store(builder.load(total), out, i64_const(WIDTH * number))


@intrinsic()
def scaled_peak(v: Lanes, row: Any, groups: Any, factor: Any, target: Any, out: Any) -> None:
    """target = row * factor (both addresses; factor 0: not at all), lanes of max|target| to out[0:16]."""
    builder = v.builder
    peak = v.variable(0.0)
    with builder.if_else(builder.icmp_signed("==", factor, i64_const(0))) as (plain, scaled):
        with plain, v.loop(groups) as group:
            w = v.load(row, builder.mul(group, i64_const(WIDTH)))
            builder.store(v.call("maxnum", builder.load(peak), v.call("fabs", w)), peak)
        with scaled, v.loop(groups) as group:
            index = builder.mul(group, i64_const(WIDTH))
            w = builder.fmul(v.load(row, index), v.load(factor, index))
            v.store(w, target, index)
            builder.store(v.call("maxnum", builder.load(peak), v.call("fabs", w)), peak)
    v.store(builder.load(peak), out, i64_const(0))


@intrinsic(scale=float32, low=float32, high=float32)
def fake_rounded(v: Lanes, row: Any, groups: Any, scale: Any, low: Any, high: Any) -> None:
    """row = round(row / scale) * scale, in place."""
    builder = v.builder
    scale, low, high = v.broadcast(scale), v.broadcast(low), v.broadcast(high)
    with v.lane_groups(groups) as index:
        q = _rounded(v, builder.fdiv(v.load(row, index), scale), low, high)
        v.store(builder.fmul(q, scale), row, index)


@intrinsic(scale=float32, low=float32, high=float32)
def rounded_bytes(
    v: Lanes, row: Any, groups: Any, scale: Any, low: Any, high: Any, shift: Any, out: Any, sums: Any
) -> None:
    """Integers to the bytes at `out`; lanes of sum(q), of the squared error and of the squared weight to sums[0:48].

    shift -1: whole bytes; 0: the low nibble, the rest zero; 4: the high nibble, the low one stays.
    """
    builder = v.builder
    scale, low, high = v.broadcast(scale), v.broadcast(low), v.broadcast(high)
    total, error, square = (v.variable(0.0) for _ in range(3))
    with v.lane_groups(groups) as start:
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


_GROUP = WIDTH * UNROLL


def ssz_scale(operands: SszScale) -> torch.Tensor:
    weight, largest, steps, grid = operands
    out = torch.empty(len(weight), 1)
    _ssz_scales(weight.contiguous().numpy(), largest, steps, grid.numpy(), out.numpy())
    return out


def fake_round(operands: FakeRound) -> torch.Tensor:
    weight, factor, largest, steps = operands
    out = torch.empty(weight.shape)
    _fake_round(weight.contiguous().numpy(), factor.float().contiguous().numpy(), largest, steps, out.numpy())
    return out


def round_rows(operands: RoundRows) -> tuple[torch.Tensor, torch.Tensor, float, float]:
    weight, scale, bits, parts = operands
    n, k = weight.shape
    stored, sums = torch.empty(n * bits // 8, k, dtype=torch.int8), torch.empty(n, parts)
    error, square = _round_rows(
        weight.contiguous().numpy(), scale.contiguous().numpy(), bits, stored.numpy(), sums.numpy()
    )
    return stored, sums, error, square


@inner
def _peak(row: Any, target: Any, factor: Any, lanes: Any) -> Any:
    """max|row * factor|, which goes to `target`; without a factor (length 0) max|row|."""
    groups, scaled = len(row) // WIDTH, len(factor) > 0
    there = factor.ctypes.data if scaled else int64(0)
    scaled_peak(row.ctypes.data, groups, there, target.ctypes.data, lanes.ctypes.data)
    peak = float32(0)
    for lane in range(WIDTH):
        peak = max(peak, lanes[lane])
    for column in range(groups * WIDTH, len(row)):
        w = row[column]
        if scaled:
            w *= factor[column]
            target[column] = w
        peak = max(peak, abs(w))
    return peak


@kernel
def _refit(row: Any, scale: Any, largest: Any, lanes: Any) -> Any:
    """(least-squares scale, gain) for the integers of `row` at `scale`."""
    low, high, inverse = float32(-largest - 1), float32(largest), float32(1) / scale
    groups = len(row) // _GROUP
    refit_sums(row.ctypes.data, groups, inverse, low, high, lanes.ctypes.data)
    along, energy = 0.0, 0.0
    for lane in range(_GROUP):
        along += lanes[lane]
        energy += lanes[_GROUP + lane]
    for column in range(groups * _GROUP, len(row)):
        q = min(max(np.rint(row[column] * inverse), low), high)
        along += float64(row[column]) * q
        energy += float64(q) * q
    if energy == 0.0:
        return scale, -1.0
    return float32(along / energy), along * along / energy


@kernel
def _ssz(row: Any, start: Any, largest: Any, steps: Any, grid: Any, lanes: Any) -> Any:
    best, gain = start, -1.0
    for ratio in grid:
        scale, new = _refit(row, start * ratio, largest, lanes)
        if new > gain:
            best, gain = scale, new
    for _ in range(steps):
        scale, new = _refit(row, best, largest, lanes)
        if not new > gain * (1 + NOISE):
            break
        best, gain = scale, new
    return best


@kernel
def _ssz_scales(weight: Any, largest: Any, steps: Any, grid: Any, out: Any) -> None:
    lanes, nothing = np.empty(2 * _GROUP, np.float32), np.empty(0, np.float32)
    for number in range(len(weight)):
        row = weight[number]
        peak = _peak(row, row, nothing, lanes)
        out[number, 0] = _ssz(row, peak / float32(largest), largest, steps, grid, lanes) if peak > 0 else float32(1)


@kernel
def _fake_round(weight: Any, factor: Any, largest: Any, steps: Any, out: Any) -> None:
    lanes, grid = np.empty(2 * _GROUP, np.float32), np.ones(1, np.float32)
    low, high, groups = float32(-largest - 1), float32(largest), weight.shape[1] // WIDTH
    for number in range(len(weight)):
        row = out[number]
        peak = _peak(weight[number], row, factor, lanes)
        if peak == 0:
            continue
        scale = peak / float32(largest)
        if steps > 0:
            scale = _ssz(row, scale, largest, steps, grid, lanes)
        fake_rounded(row.ctypes.data, groups, scale, low, high)
        for column in range(groups * WIDTH, len(row)):
            row[column] = min(max(np.rint(row[column] / scale), low), high) * scale


@kernel
def _round_rows(weight: Any, scale: Any, bits: Any, stored: Any, sums: Any) -> Any:
    n, k = weight.shape
    run, high = k // sums.shape[1], float32(2 ** (bits - 1) - 1)
    low, groups = -high - float32(1), run // WIDTH
    lanes = np.empty(3 * WIDTH, np.float32)
    error, square = 0.0, 0.0
    for number in range(n):
        shift = int64(-1) if bits == 8 else int64(number % 2 * 4)
        out, s = stored[number] if bits == 8 else stored[number // 2], scale[number, 0]
        for part in range(sums.shape[1]):
            row, target = weight[number, part * run : (part + 1) * run], out[part * run : (part + 1) * run]
            rounded_bytes(
                row.ctypes.data, groups, s, low, high, shift, target.ctypes.data, lanes.ctypes.data,
            )  # fmt: skip
            total = float32(0)
            for lane in range(WIDTH):
                total += lanes[lane]
                error += float64(lanes[WIDTH + lane])
                square += float64(lanes[2 * WIDTH + lane])
            for column in range(groups * WIDTH, run):
                w = row[column]
                q = min(max(np.rint(w / s), low), high)
                total += q
                error += float64(q * s - w) ** 2
                square += float64(w) ** 2
                if shift < 0:
                    target[column] = int8(q)
                elif shift == 0:
                    target[column] = int8(int64(q) & 15)
                else:
                    target[column] = int8((int64(q) << 4) | target[column])
            sums[number, part] = total
    return error, square
