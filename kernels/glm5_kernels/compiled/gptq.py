"""GPTQ compiled: the lanes are sixteen rows of the weight, and eight columns share a pass over the carried error.

The error that the rows carry on each input is read once for eight columns. Within these, a column's error reaches the
next ones through the products of their inputs and factors, which all rows share.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numba import float32
from numpy.typing import NDArray

from glm5_kernels.compiled.jit import inner, kernel
from glm5_kernels.compiled.simd import WIDTH, Lanes, i64_const, intrinsic
from glm5_kernels.gptq import GptqRound
from glm5_kernels.gptq.reference import gptq_inverse_factors

__all__ = ["gptq_inverse_factors", "gptq_round"]

GROUP = 8  # columns of a pass: their sums fit the registers
BLOCKS = 8  # blocks of WIDTH rows that share a pass over inputs and factors: their carried error stays in the L2 cache
TILE = 128  # columns of sixteen rows that are transposed together: 8 KiB

Floats = NDArray[np.float32]


class Groups(NamedTuple):
    """Inputs and factors in G groups of GROUP columns, in the order `perm` (int64 [K]).

    x, hinv: fp32 [G, n, GROUP].
    coupling, gram: fp32 [G, GROUP, GROUP], hinv^T x and x^T x of a group.
    curvature: fp32 [G * GROUP], the diagonal of H.
    """

    perm: NDArray[np.int64]
    x: Floats
    hinv: Floats
    coupling: Floats
    gram: Floats
    curvature: Floats
    damping: float


class RowBlock(NamedTuple):
    """Sixteen rows of the weight and of the integers, fp32 [K, WIDTH], and their scales, fp32 [WIDTH]."""

    w: Floats
    q: Floats
    scale: Floats


def gptq_round(operands: GptqRound) -> tuple[torch.Tensor, torch.Tensor]:
    weight, scale, largest, perm, inputs, hinv_factors, damping, passes, refit = operands
    x, hinv = _grouped(inputs), _grouped(hinv_factors)
    coupling = hinv.mT @ x
    gram = x.mT @ x if passes else coupling  # only the descent reads it
    curvature = F.pad(inputs.float().square().sum(1), (0, -len(inputs) % GROUP)) + damping
    groups = Groups(
        perm.contiguous().numpy(), x.numpy(), hinv.numpy(), coupling.contiguous().numpy(), gram.contiguous().numpy(),
        curvature.numpy(), damping,
    )  # fmt: skip
    q, new_scale = torch.empty(weight.shape), scale.float().clone()
    _round(weight.float().contiguous().numpy(), new_scale.numpy(), largest, groups, passes, refit, q.numpy())
    return q, new_scale


def _grouped(rows: torch.Tensor) -> torch.Tensor:
    """fp32 [K, n] -> [ceil(K / 8), n, 8]; the columns that fill up the last group are zero and change nothing."""
    filled = F.pad(rows.float(), (0, 0, 0, -len(rows) % GROUP))
    return filled.view(-1, GROUP, rows.shape[1]).mT.contiguous()


@intrinsic()
def _dots(v: Lanes, carried: Any, group: Any, n: Any, out: Any) -> None:
    """out[c, lane] = sum over i of carried[i, lane] * group[i, c]; all are addresses."""
    builder = v.builder
    sums = [v.variable(0.0) for _ in range(GROUP)]
    with v.loop(n) as i:
        row, first = v.load(carried, builder.mul(i, i64_const(WIDTH))), builder.mul(i, i64_const(GROUP))
        for column, total in enumerate(sums):
            factor = v.broadcast(v.load_scalar(group, builder.add(first, i64_const(column))))
            builder.store(v.call("fmuladd", row, factor, builder.load(total)), total)
    for column, total in enumerate(sums):
        v.store(builder.load(total), out, i64_const(WIDTH * column))


@intrinsic()
def _add(v: Lanes, carried: Any, group: Any, n: Any, factors: Any) -> None:
    """carried[i, lane] += sum over c of group[i, c] * factors[c, lane], c in order; all are addresses."""
    builder = v.builder
    columns = [v.load(factors, i64_const(WIDTH * column)) for column in range(GROUP)]
    with v.loop(n) as i:
        row, first = builder.mul(i, i64_const(WIDTH)), builder.mul(i, i64_const(GROUP))
        total = v.load(carried, row)
        for column, factor in enumerate(columns):
            x = v.broadcast(v.load_scalar(group, builder.add(first, i64_const(column))))
            total = v.call("fmuladd", factor, x, total)
        v.store(total, carried, row)


@intrinsic(low=float32, high=float32)
def _round_group(
    v: Lanes, w: Any, compensation: Any, coupling: Any, scale: Any, low: Any, high: Any, q: Any, errors: Any
) -> None:
    """Integers q and errors of a group's columns, each with the compensation of the columns before it; addresses."""
    builder = v.builder
    step, least, most = v.load(scale, i64_const(0)), v.broadcast(low), v.broadcast(high)
    column_errors: list[Any] = []
    for column in range(GROUP):
        offset = i64_const(WIDTH * column)
        value = builder.fadd(v.load(w, offset), v.load(compensation, offset))
        for before, error in enumerate(column_errors):
            factor = v.broadcast(v.load_scalar(coupling, i64_const(GROUP * before + column)))
            value = builder.fadd(value, builder.fmul(error, factor))
        whole = v.call("rint", builder.fdiv(value, step))
        whole = v.call("minnum", v.call("maxnum", whole, least), most)
        column_errors.append(builder.fsub(value, builder.fmul(whole, step)))
        v.store(whole, q, offset)
    for column, error in enumerate(column_errors):
        v.store(error, errors, i64_const(WIDTH * column))


@inner
def _first_pass(w: Floats, q: Floats, scale: Floats, low: Any, high: Any, groups: Groups, carried: Floats) -> None:
    """Round every column of the blocks of rows once; `carried` [blocks, n, WIDTH] is their error on the inputs."""
    n, workspace = groups.x.shape[1], np.empty((2 * GROUP, WIDTH), np.float32)
    compensation, errors = workspace[:GROUP], workspace[GROUP:]
    carried[:] = 0
    for group in range(len(groups.x)):
        k = group * GROUP
        for block in range(len(w)):
            _dots(carried[block].ctypes.data, groups.x[group].ctypes.data, n, compensation.ctypes.data)
            _round_group(
                w[block, k:].ctypes.data, compensation.ctypes.data, groups.coupling[group].ctypes.data,
                scale[block].ctypes.data, low, high, q[block, k:].ctypes.data, errors.ctypes.data,
            )  # fmt: skip
            _add(carried[block].ctypes.data, groups.hinv[group].ctypes.data, n, errors.ctypes.data)


@inner
def _outputs(rows: Floats, x: Floats, out: Floats) -> None:
    """out [n, WIDTH] <- sixteen rows [K, WIDTH] times the inputs."""
    out[:] = 0
    for group in range(len(x)):
        _add(out.ctypes.data, x[group].ctypes.data, x.shape[1], rows[group * GROUP :].ctypes.data)


@inner
def _refit(block: RowBlock, outputs: Floats, rounded_outputs: Floats, damping: Any) -> None:
    """The scale with the least cost for the integers; a row without a positive one keeps its scale."""
    numerator, denominator = np.zeros(WIDTH), np.zeros(WIDTH)
    for i in range(len(outputs)):
        for lane in range(WIDTH):
            numerator[lane] += float(rounded_outputs[i, lane]) * outputs[i, lane]
            denominator[lane] += float(rounded_outputs[i, lane]) * rounded_outputs[i, lane]
    for k in range(len(block.w)):
        for lane in range(WIDTH):
            numerator[lane] += damping * block.w[k, lane] * block.q[k, lane]
            denominator[lane] += damping * block.q[k, lane] * block.q[k, lane]
    for lane in range(WIDTH):
        if numerator[lane] > 0 and denominator[lane] > 0:
            block.scale[lane] = float32(numerator[lane] / denominator[lane])


@inner
def _descend(block: RowBlock, low: Any, high: Any, groups: Groups, residual: Floats, workspace: Floats) -> None:
    """Move every column once to its best integer; `residual` [n, WIDTH] is the error of the outputs."""
    w, q, scale = block
    n, moves, damping = groups.x.shape[1], workspace[GROUP:], float32(groups.damping)
    for group in range(len(groups.x)):
        _dots(residual.ctypes.data, groups.x[group].ctypes.data, n, workspace.ctypes.data)
        moved = False
        for c in range(GROUP):
            k = group * GROUP + c
            for lane in range(WIDTH):
                gradient = workspace[c, lane] + damping * (w[k, lane] - q[k, lane] * scale[lane])
                for before in range(c):
                    gradient += moves[before, lane] * groups.gram[group, before, c]
                better = min(max(np.rint(q[k, lane] + gradient / groups.curvature[k] / scale[lane]), low), high)
                moves[c, lane] = (q[k, lane] - better) * scale[lane]
                moved |= better != q[k, lane]
                q[k, lane] = better
        if moved:
            _add(residual.ctypes.data, groups.x[group].ctypes.data, n, moves.ctypes.data)


@inner
def _improve(block: RowBlock, low: Any, high: Any, groups: Groups, passes: Any, refit: Any) -> None:
    """The passes after the first one, for sixteen rows."""
    n, workspace = groups.x.shape[1], np.empty((2 * GROUP, WIDTH), np.float32)
    outputs, rounded = np.empty((n, WIDTH), np.float32), np.empty((n, WIDTH), np.float32)
    damping = float32(groups.damping)
    _outputs(block.w, groups.x, outputs)
    for _ in range(passes):
        _outputs(block.q, groups.x, rounded)
        if refit:
            _refit(block, outputs, rounded, damping)
        for i in range(n):
            for lane in range(WIDTH):
                rounded[i, lane] = outputs[i, lane] - block.scale[lane] * rounded[i, lane]
        _descend(block, low, high, groups, rounded, workspace)
    if refit:
        _outputs(block.q, groups.x, rounded)
        _refit(block, outputs, rounded, damping)


@inner
def _copy(rows: Floats, start: Any, stop: Any, perm: NDArray[np.int64], blocks: Floats, back: Any) -> None:
    """blocks [B, K, WIDTH] <- rows start..stop of [N, K], permuted and transposed; or `back` from there to the rows."""
    for first in range(0, len(perm), TILE):
        for row in range(start, stop):
            block, lane = divmod(row - start, WIDTH)
            for k in range(first, min(first + TILE, len(perm))):
                if back:
                    rows[row, perm[k]] = blocks[block, k, lane]
                else:
                    blocks[block, k, lane] = rows[row, perm[k]]


@kernel
def _round(weight: Floats, scale: Floats, largest: Any, groups: Groups, passes: Any, refit: Any, out: Floats) -> None:
    n, rows = groups.x.shape[1], len(weight)
    low, high = float32(-largest - 1), float32(largest)
    blocks = min(BLOCKS, -(-rows // WIDTH))
    w = np.zeros((blocks, len(groups.x) * GROUP, WIDTH), np.float32)
    q = np.zeros_like(w)
    carried, lane_scale = np.empty((blocks, n, WIDTH), np.float32), np.ones((blocks, WIDTH), np.float32)
    for start in range(0, rows, blocks * WIDTH):
        stop = min(start + blocks * WIDTH, rows)
        for row in range(start, stop):
            lane_scale[(row - start) // WIDTH, (row - start) % WIDTH] = scale[row, 0]
        _copy(weight, start, stop, groups.perm, w, False)
        count = -(-(stop - start) // WIDTH)
        _first_pass(w[:count], q, lane_scale, low, high, groups, carried)
        for block in range(count if passes > 0 else 0):
            _improve(RowBlock(w[block], q[block], lane_scale[block]), low, high, groups, passes, refit)
        for row in range(start, stop):
            scale[row, 0] = lane_scale[(row - start) // WIDTH, (row - start) % WIDTH]
        _copy(out, start, stop, groups.perm, q, True)
