"""Hadamard transform compiled: butterflies on sixteen lanes, no product with a matrix but for the core.

Along rows the lanes are sixteen neighbours: the four lowest levels are shuffles inside them, the others butterflies
between them. Along columns the lanes are sixteen columns and every level is a butterfly. Only additions in a fixed
order: the same bits on every CPU. Sizes too small for sixteen lanes are left to the reference.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import types
from numba.extending import intrinsic

from glm5_kernels.compiled.jit import inner, kernel
from glm5_kernels.compiled.simd import WIDTH, Lanes, for_range, i64_const, returns_void
from glm5_kernels.hadamard import reference

#: Columns worked on side by side: whole cache lines are read, and n of them stay in the second-level cache.
PANEL = 32


def hadamard(x: torch.Tensor, weight: torch.Tensor, dim: int = 1) -> torch.Tensor:
    """See the package docstring."""
    n = reference.checked_size(x, weight, dim)
    core = reference.core(n)
    if (dim == 1 and n // core < WIDTH) or (dim == 0 and x.shape[1] % WIDTH) or x.stride(1) != 1:
        return reference.hadamard(x, weight, dim)
    matrix = reference.core_matrix(core).T.contiguous().numpy()
    scaled = (weight.float() / n**0.5).contiguous().numpy()
    (_rows if dim == 1 else _columns)(x.data_ptr(), *x.shape, x.stride(0), scaled, core, matrix)
    return x


@intrinsic  # type: ignore[untyped-decorator]
def _lanes(_: Any, address: Any, weight: Any, groups: Any) -> Any:
    """Multiply by `weight` and transform every sixteen neighbours among themselves."""

    def generate(builder: Any, arguments: Any) -> None:
        address, weight, groups = arguments
        v = Lanes(builder)
        with for_range(builder, groups) as group:
            start = builder.mul(group, i64_const(WIDTH))
            x = builder.fmul(v.load(address, start), v.load(weight, start))
            for bit in (1, 2, 4, 8):
                partner = v.shuffle(x, [lane ^ bit for lane in range(WIDTH)])
                x = v.call("fmuladd", x, v.vector([-1.0 if lane & bit else 1.0 for lane in range(WIDTH)]), partner)
            v.store(x, address, start)

    return types.void(types.int64, types.int64, types.int64), returns_void(generate)


@intrinsic  # type: ignore[untyped-decorator]
def _butterflies(_: Any, address: Any, rows: Any, step: Any, pitch: Any) -> Any:
    """Two levels at once between the lane groups i, i + step, i + 2 step, i + 3 step for all i; `pitch` fp32 apart."""

    def generate(builder: Any, arguments: Any) -> None:
        address, rows, step, pitch = arguments
        v = Lanes(builder)
        four = builder.mul(step, i64_const(4))
        with for_range(builder, builder.sdiv(rows, four)) as block, for_range(builder, step) as inner:
            first = builder.add(builder.mul(block, four), inner)
            offsets = [builder.mul(builder.add(first, builder.mul(step, i64_const(k))), pitch) for k in range(4)]
            a, b, c, d = (v.load(address, offset) for offset in offsets)
            s, t, u, w = builder.fadd(a, b), builder.fsub(a, b), builder.fadd(c, d), builder.fsub(c, d)
            results = builder.fadd(s, u), builder.fadd(t, w), builder.fsub(s, u), builder.fsub(t, w)
            for value, offset in zip(results, offsets, strict=True):
                v.store(value, address, offset)

    return types.void(types.int64, types.int64, types.int64, types.int64), returns_void(generate)


@intrinsic  # type: ignore[untyped-decorator]
def _butterfly(_: Any, address: Any, rows: Any, step: Any, pitch: Any) -> Any:
    """One level, between the lane groups i and i + step."""

    def generate(builder: Any, arguments: Any) -> None:
        address, rows, step, pitch = arguments
        v = Lanes(builder)
        two = builder.mul(step, i64_const(2))
        with for_range(builder, builder.sdiv(rows, two)) as block, for_range(builder, step) as inner:
            first = builder.add(builder.mul(block, two), inner)
            low, high = builder.mul(first, pitch), builder.mul(builder.add(first, step), pitch)
            a, b = v.load(address, low), v.load(address, high)
            v.store(builder.fadd(a, b), address, low)
            v.store(builder.fsub(a, b), address, high)

    return types.void(types.int64, types.int64, types.int64, types.int64), returns_void(generate)


@intrinsic  # type: ignore[untyped-decorator]
def _core(_: Any, address: Any, blocks: Any, pitch: Any, core: Any, matrix: Any, scratch: Any) -> Any:
    """x[a] <- sum over b of matrix[a, b] x[b] between `core` runs of `blocks` lane groups; `scratch` has core * 16."""

    def generate(builder: Any, arguments: Any) -> None:
        address, blocks, pitch, core, matrix, scratch = arguments
        v = Lanes(builder)
        run = builder.mul(blocks, pitch)
        with for_range(builder, blocks) as block:
            start = builder.mul(block, pitch)
            with for_range(builder, core) as a:
                total = v.variable(0.0)
                with for_range(builder, core) as b:
                    sign = v.broadcast(v.load_scalar(matrix, builder.add(builder.mul(a, core), b)))
                    x = v.load(address, builder.add(start, builder.mul(b, run)))
                    builder.store(v.call("fmuladd", sign, x, builder.load(total)), total)
                v.store(builder.load(total), scratch, builder.mul(a, i64_const(WIDTH)))
            with for_range(builder, core) as a:
                offset = builder.add(start, builder.mul(a, run))
                v.store(v.load(scratch, builder.mul(a, i64_const(WIDTH))), address, offset)

    signature = types.void(types.int64, types.int64, types.int64, types.int64, types.int64, types.int64)
    return signature, returns_void(generate)


@inner
def _between(address: Any, groups: Any, pitch: Any, core: Any, matrix: Any, scratch: Any) -> None:
    """The levels between `groups` lane groups, `pitch` fp32 apart."""
    step, size = 1, groups // core
    while 4 * step <= size:
        _butterflies(address, groups, step, pitch)
        step *= 4
    if 2 * step <= size:
        _butterfly(address, groups, step, pitch)
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


@intrinsic  # type: ignore[untyped-decorator]
def _copy(
    _: Any, source: Any, source_pitch: Any, target: Any, target_pitch: Any, weight: Any, rows: Any, groups: Any
) -> Any:
    """target[r, :] <- source[r, :] * weight[r] for `groups` lane groups; pitches in fp32."""

    def generate(builder: Any, arguments: Any) -> None:
        source, source_pitch, target, target_pitch, weight, rows, groups = arguments
        v = Lanes(builder)
        with for_range(builder, rows) as row:
            factor = v.broadcast(v.load_scalar(weight, row))
            with for_range(builder, groups) as group:
                lane = builder.mul(group, i64_const(WIDTH))
                x = v.load(source, builder.add(builder.mul(row, source_pitch), lane))
                v.store(builder.fmul(x, factor), target, builder.add(builder.mul(row, target_pitch), lane))

    return types.void(*[types.int64] * 7), returns_void(generate)


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
