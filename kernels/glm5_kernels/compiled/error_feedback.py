"""Error feedback compiled: sixteen rows of the weight are the lanes, eight columns share a pass over what is carried.

What the rows carry of each input is read once for eight columns; among these, a column's error reaches the next ones
through the products of their inputs and gains, which all rows share.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numba import float32, int64, types
from numba.extending import intrinsic

from glm5_kernels.compiled.jit import inner, kernel
from glm5_kernels.compiled.simd import WIDTH, Lanes, for_range, i64_const, returns_void
from glm5_kernels.error_feedback.reference import check, feedback_gains

__all__ = ["feedback_gains", "round_with_feedback"]

GROUP = 8  # columns of a pass: their sums fit the registers
BLOCKS = 8  # of WIDTH rows, that share a pass over inputs and gains: what all of them carry stays in the nearer caches
TILE = 128  # columns of sixteen rows that change places together: 8 KiB


def round_with_feedback(
    weight: torch.Tensor,
    scale: torch.Tensor,
    largest: int,
    order: torch.Tensor,
    inputs: torch.Tensor,
    gains: torch.Tensor,
    damping: float,
    passes: int,
    refit: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the package docstring."""
    check(weight, scale, order, inputs, gains)
    x, u = _grouped(inputs), _grouped(gains)
    handed = u.mT @ x
    shared = x.mT @ x if passes else handed  # only descent reads it
    curvature = F.pad(inputs.float().square().sum(1), (0, -len(inputs) % GROUP)) + damping
    q, found = torch.empty(weight.shape), scale.float().clone()
    arrays = [t.contiguous().numpy() for t in (order, x, u, handed, shared, curvature)]
    _round(weight.float().contiguous().numpy(), found.numpy(), largest, *arrays, damping, passes, refit, q.numpy())
    return q, found


def _grouped(rows: torch.Tensor) -> torch.Tensor:
    """fp32 [K, n] -> [ceil(K / 8), n, 8]; the columns that fill up the last group are zero and change nothing."""
    filled = F.pad(rows.float(), (0, 0, 0, -len(rows) % GROUP))
    return filled.view(-1, GROUP, rows.shape[1]).mT.contiguous()


@intrinsic  # type: ignore[untyped-decorator]
def _dots(_: Any, carried: Any, group: Any, n: Any, out: Any) -> Any:
    """out[c, lane] = sum over i of carried[i, lane] * group[i, c]."""

    def generate(builder: Any, arguments: Any) -> None:
        carried, group, n, out = arguments
        v = Lanes(builder)
        sums = [v.variable(0.0) for _ in range(GROUP)]
        with for_range(builder, n) as i:
            found, first = v.load(carried, builder.mul(i, i64_const(WIDTH))), builder.mul(i, i64_const(GROUP))
            for column, total in enumerate(sums):
                factor = v.broadcast(v.load_scalar(group, builder.add(first, i64_const(column))))
                builder.store(v.call("fmuladd", found, factor, builder.load(total)), total)
        for column, total in enumerate(sums):
            v.store(builder.load(total), out, i64_const(WIDTH * column))

    return types.void(int64, int64, int64, int64), returns_void(generate)


@intrinsic  # type: ignore[untyped-decorator]
def _add(_: Any, carried: Any, group: Any, n: Any, factors: Any) -> Any:
    """carried[i, lane] += sum over c of group[i, c] * factors[c, lane], c in order."""

    def generate(builder: Any, arguments: Any) -> None:
        carried, group, n, factors = arguments
        v = Lanes(builder)
        held = [v.load(factors, i64_const(WIDTH * column)) for column in range(GROUP)]
        with for_range(builder, n) as i:
            place, first = builder.mul(i, i64_const(WIDTH)), builder.mul(i, i64_const(GROUP))
            total = v.load(carried, place)
            for column, factor in enumerate(held):
                total = v.call(
                    "fmuladd", factor, v.broadcast(v.load_scalar(group, builder.add(first, i64_const(column)))), total
                )
            v.store(total, carried, place)

    return types.void(int64, int64, int64, int64), returns_void(generate)


@intrinsic  # type: ignore[untyped-decorator]
def _nearest(
    _: Any, w: Any, sums: Any, handed: Any, scale: Any, low: Any, high: Any, q: Any, errors: Any
) -> Any:  # fmt: skip
    """The integers of a group's columns, each after what the group's earlier ones hand on, and their errors."""

    def generate(builder: Any, arguments: Any) -> None:
        w, sums, handed, scale, low, high, q, errors = arguments
        v = Lanes(builder)
        step, least, most = v.load(scale, i64_const(0)), v.broadcast(low), v.broadcast(high)
        left: list[Any] = []
        for column in range(GROUP):
            place = i64_const(WIDTH * column)
            value = builder.fadd(v.load(w, place), v.load(sums, place))
            for before, error in enumerate(left):
                factor = v.broadcast(v.load_scalar(handed, i64_const(GROUP * before + column)))
                value = builder.fadd(value, builder.fmul(error, factor))
            whole = v.call("rint", builder.fdiv(value, step))
            whole = v.call("minnum", v.call("maxnum", whole, least), most)
            left.append(builder.fsub(value, builder.fmul(whole, step)))
            v.store(whole, q, place)
        for column, error in enumerate(left):
            v.store(error, errors, i64_const(WIDTH * column))

    return types.void(int64, int64, int64, int64, float32, float32, int64, int64), returns_void(generate)


@inner
def _first(blocks: Any, w: Any, q: Any, s: Any, low: Any, high: Any, x: Any, u: Any, handed: Any, carried: Any) -> None:
    """Every column of so many blocks of rows once, its error handed on to the columns behind it."""
    n, room = x.shape[1], np.empty((2 * GROUP, WIDTH), np.float32)
    sums, errors = room[:GROUP], room[GROUP:]
    carried[:] = 0
    for group in range(len(x)):
        k = group * GROUP
        for block in range(blocks):
            _dots(carried[block].ctypes.data, x[group].ctypes.data, n, sums.ctypes.data)
            _nearest(
                w[block, k:].ctypes.data, sums.ctypes.data, handed[group].ctypes.data, s[block].ctypes.data, low, high,
                q[block, k:].ctypes.data, errors.ctypes.data,
            )  # fmt: skip
            _add(carried[block].ctypes.data, u[group].ctypes.data, n, errors.ctypes.data)


@inner
def _outputs(w: Any, x: Any, out: Any) -> None:
    """out [n, 16] = what sixteen rows w [K, 16] make of the inputs."""
    out[:] = 0
    for group in range(len(x)):
        _add(out.ctypes.data, x[group].ctypes.data, x.shape[1], w[group * GROUP :].ctypes.data)


@inner
def _refit(w: Any, q: Any, s: Any, wanted: Any, got: Any, damping: Any) -> None:
    along, energy = np.zeros(WIDTH), np.zeros(WIDTH)
    for i in range(len(wanted)):
        for lane in range(WIDTH):
            along[lane] += float(got[i, lane]) * wanted[i, lane]
            energy[lane] += float(got[i, lane]) * got[i, lane]
    for k in range(len(w)):
        for lane in range(WIDTH):
            along[lane] += damping * w[k, lane] * q[k, lane]
            energy[lane] += damping * q[k, lane] * q[k, lane]
    for lane in range(WIDTH):
        if along[lane] > 0 and energy[lane] > 0:
            s[lane] = float32(along[lane] / energy[lane])


@inner
def _descend(
    w: Any, q: Any, s: Any, low: Any, high: Any, x: Any, shared: Any, left: Any, curvature: Any, damping: Any, room: Any
) -> None:
    """Every column once, to its best integer while the others stay; `left` is what the outputs miss."""
    n, moves = x.shape[1], room[GROUP:]
    for group in range(len(x)):
        _dots(left.ctypes.data, x[group].ctypes.data, n, room.ctypes.data)
        moved = False
        for c in range(GROUP):
            k = group * GROUP + c
            for lane in range(WIDTH):
                along = room[c, lane] + damping * (w[k, lane] - q[k, lane] * s[lane])
                for before in range(c):
                    along += moves[before, lane] * shared[group, before, c]
                better = min(max(np.rint(q[k, lane] + along / curvature[k] / s[lane]), low), high)
                moves[c, lane] = (q[k, lane] - better) * s[lane]
                moved |= better != q[k, lane]
                q[k, lane] = better
        if moved:
            _add(left.ctypes.data, x[group].ctypes.data, n, moves.ctypes.data)


@inner
def _improve(
    w: Any, q: Any, s: Any, low: Any, high: Any, x: Any, shared: Any, curvature: Any, damping: Any, passes: Any,
    refit: Any,
) -> None:  # fmt: skip
    """The passes after the first, for one block of rows."""
    n, room = x.shape[1], np.empty((2 * GROUP, WIDTH), np.float32)
    wanted, got = np.empty((n, WIDTH), np.float32), np.empty((n, WIDTH), np.float32)
    _outputs(w, x, wanted)
    for _ in range(passes):
        _outputs(q, x, got)
        if refit:
            _refit(w, q, s, wanted, got, damping)
        for i in range(n):
            for lane in range(WIDTH):
                got[i, lane] = wanted[i, lane] - s[lane] * got[i, lane]
        _descend(w, q, s, low, high, x, shared, got, curvature, damping, room)
    if refit:
        _outputs(q, x, got)
        _refit(w, q, s, wanted, got, damping)


@inner
def _load(weight: Any, start: Any, stop: Any, order: Any, w: Any) -> None:
    """Rows start to stop of the weight [N, K] into w [blocks, K, 16]."""
    for first in range(0, len(order), TILE):
        for row in range(start, stop):
            block, lane = divmod(row - start, WIDTH)
            for k in range(first, min(first + TILE, len(order))):
                w[block, k, lane] = weight[row, order[k]]


@inner
def _store(q: Any, start: Any, stop: Any, order: Any, out: Any) -> None:
    """The other way."""
    for first in range(0, len(order), TILE):
        for row in range(start, stop):
            block, lane = divmod(row - start, WIDTH)
            for k in range(first, min(first + TILE, len(order))):
                out[row, order[k]] = q[block, k, lane]


@kernel
def _round(
    weight: Any, scale: Any, largest: Any, order: Any, x: Any, u: Any, handed: Any, shared: Any, curvature: Any,
    damping: Any, passes: Any, refit: Any, out: Any,
) -> None:  # fmt: skip
    rows = len(weight)
    n, low, high, strength = x.shape[1], float32(-largest - 1), float32(largest), float32(damping)
    blocks = min(BLOCKS, -(-rows // WIDTH))
    w = np.zeros((blocks, len(x) * GROUP, WIDTH), np.float32)
    q = np.zeros_like(w)
    carried, s = np.empty((blocks, n, WIDTH), np.float32), np.ones((blocks, WIDTH), np.float32)
    for start in range(0, rows, blocks * WIDTH):
        stop = min(start + blocks * WIDTH, rows)
        for row in range(start, stop):
            s[(row - start) // WIDTH, (row - start) % WIDTH] = scale[row, 0]
        _load(weight, start, stop, order, w)
        here = min(blocks, -(-(rows - start) // WIDTH))
        _first(here, w, q, s, low, high, x, u, handed, carried)
        for block in range(here if passes > 0 else 0):
            _improve(w[block], q[block], s[block], low, high, x, shared, curvature, strength, passes, refit)
        for row in range(start, stop):
            scale[row, 0] = s[(row - start) // WIDTH, (row - start) % WIDTH]
        _store(q, start, stop, order, out)
