"""Hadamard transform compiled: butterflies on sixteen lanes, no product with a matrix but for the core.

Along rows the lanes are sixteen neighbours: the four lowest levels are shuffles inside them, the others butterflies
between them. Along columns the lanes are sixteen columns and every level is a butterfly. Only additions in a fixed
order: the same bits on every CPU. Sizes too small for sixteen lanes are left to the reference.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from glm5_kernels.compiled.jit import inner, kernel
from glm5_kernels.compiled.simd import WIDTH, Lanes, i64_const, intrinsic
from glm5_kernels.hadamard import Hadamard, core_order, reference

#: Columns worked on side by side: whole cache lines are read, and n of them stay in the second-level cache.
PANEL = 32


def hadamard(operands: Hadamard) -> torch.Tensor:
    x, weight, dim = operands
    n = len(weight)
    core = core_order(n)
    if (dim == 1 and n // core < WIDTH) or (dim == 0 and x.shape[1] % WIDTH) or x.stride(1) != 1:
        return reference.hadamard(operands)
    matrix = reference.core_matrix(core).T.contiguous().numpy()
    scaled = (weight.float() / n**0.5).contiguous().numpy()
    (_rows if dim == 1 else _columns)(x.data_ptr(), *x.shape, x.stride(0), scaled, core, matrix)
    return x


@intrinsic()
def _lanes(v: Lanes, address: Any, weight: Any, groups: Any) -> None:
    """Multiply by `weight` and transform every sixteen neighbours among themselves."""
    builder = v.builder
    with v.lane_groups(groups) as start:
        x = builder.fmul(v.load(address, start), v.load(weight, start))
        for bit in (1, 2, 4, 8):
            partner = v.shuffle(x, [lane ^ bit for lane in range(WIDTH)])
            x = v.call("fmuladd", x, v.constant([-1.0 if lane & bit else 1.0 for lane in range(WIDTH)]), partner)
        v.store(x, address, start)


def _butterflies(levels: int) -> Any:
    @intrinsic()
    def butterflies(v: Lanes, address: Any, rows: Any, step: Any, pitch: Any) -> None:
        """So many levels between the lane groups i, i + step, i + 2 step, ... for all i; `pitch` fp32 apart."""
        builder, count = v.builder, 2**levels
        whole = builder.mul(step, i64_const(count))
        with v.loop(builder.sdiv(rows, whole)) as block, v.loop(step) as inner:
            first = builder.add(builder.mul(block, whole), inner)
            groups = [builder.add(first, builder.mul(step, i64_const(number))) for number in range(count)]
            offsets = [builder.mul(group, pitch) for group in groups]
            x = [v.load(address, offset) for offset in offsets]
            for distance in (2**level for level in range(levels)):
                for low in (number for number in range(count) if not number & distance):
                    a, b = x[low], x[low + distance]
                    x[low], x[low + distance] = builder.fadd(a, b), builder.fsub(a, b)
            for value, offset in zip(x, offsets, strict=True):
                v.store(value, address, offset)

    return butterflies


_one_level, _two_levels = _butterflies(1), _butterflies(2)


@intrinsic()
def _core(v: Lanes, address: Any, blocks: Any, pitch: Any, core: Any, matrix: Any, scratch: Any) -> None:
    """x[a] <- sum over b of matrix[a, b] x[b] between `core` runs of `blocks` lane groups; `scratch` has core * 16."""
    builder = v.builder
    run = builder.mul(blocks, pitch)
    with v.loop(blocks) as block:
        start = builder.mul(block, pitch)
        with v.loop(core) as a:
            total = v.variable(0.0)
            with v.loop(core) as b:
                sign = v.broadcast(v.load_scalar(matrix, builder.add(builder.mul(a, core), b)))
                x = v.load(address, builder.add(start, builder.mul(b, run)))
                builder.store(v.call("fmuladd", sign, x, builder.load(total)), total)
            v.store(builder.load(total), scratch, builder.mul(a, i64_const(WIDTH)))
        with v.loop(core) as a:
            offset = builder.add(start, builder.mul(a, run))
            v.store(v.load(scratch, builder.mul(a, i64_const(WIDTH))), address, offset)


@inner
def _between(address: Any, groups: Any, pitch: Any, core: Any, matrix: Any, scratch: Any) -> None:
    """The levels between `groups` lane groups, `pitch` fp32 apart."""
    step, size = 1, groups // core
    while 4 * step <= size:
        _two_levels(address, groups, step, pitch)
        step *= 4
    if 2 * step <= size:
        _one_level(address, groups, step, pitch)
    if core > 1:
        _core(address, size, pitch, core, matrix.ctypes.data, scratch.ctypes.data)


@kernel
def _rows(address: Any, rows: Any, columns: Any, pitch: Any, weight: Any, core: Any, matrix: Any) -> None:
    n, scratch = len(weight), np.empty(core * WIDTH, np.float32)
    for row in range(rows):
        for start in range(0, columns, n):
            here = address + 4 * (row * pitch + start)
            _lanes(here, weight.ctypes.data, n // WIDTH)
            _between(here, n // WIDTH, WIDTH, core, matrix, scratch)


@intrinsic()
def _copy(
    v: Lanes, source: Any, source_pitch: Any, target: Any, target_pitch: Any, weight: Any, rows: Any, groups: Any
) -> None:
    """target[r, :] <- source[r, :] * weight[r] for `groups` lane groups; pitches in fp32."""
    builder = v.builder
    with v.loop(rows) as row:
        factor = v.broadcast(v.load_scalar(weight, row))
        with v.lane_groups(groups) as lane:
            x = v.load(source, builder.add(builder.mul(row, source_pitch), lane))
            v.store(builder.fmul(x, factor), target, builder.add(builder.mul(row, target_pitch), lane))


@kernel
def _columns(address: Any, rows: Any, columns: Any, pitch: Any, weight: Any, core: Any, matrix: Any) -> None:
    n, scratch = len(weight), np.empty(core * WIDTH, np.float32)
    panel, ones = np.empty((n, PANEL), np.float32), np.ones(n, np.float32)
    for start in range(0, rows, n):
        for column in range(0, columns, PANEL):
            here, groups = address + 4 * (start * pitch + column), min(PANEL, columns - column) // WIDTH
            _copy(here, pitch, panel.ctypes.data, PANEL, weight.ctypes.data, n, groups)
            for group in range(groups):
                _between(panel.ctypes.data + 4 * group * WIDTH, n, PANEL, core, matrix, scratch)
            _copy(panel.ctypes.data, PANEL, here, pitch, ones.ctypes.data, n, groups)
