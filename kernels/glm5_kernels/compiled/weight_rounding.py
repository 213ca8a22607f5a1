"""Weight rounding compiled: a row stays in the nearest cache for all that is done to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import float32, float64, int8, int64

from glm5_kernels.compiled.jit import inner, kernel
from glm5_kernels.compiled.simd import WIDTH
from glm5_kernels.compiled.weight_rounding_intrinsics import (
    UNROLL,
    fake_rounded,
    refit_sums,
    rounded_bytes,
    scaled_peak,
)
from glm5_kernels.errors import require_fp32, require_matrix, require_shape
from glm5_kernels.weight_rounding.reference import NOISE, check_rounding

_GROUP = WIDTH * UNROLL


def ssz_scale(weight: torch.Tensor, largest: int, steps: int, grid: torch.Tensor) -> torch.Tensor:
    """See the package docstring."""
    require_matrix("weight", weight)
    require_fp32("grid", grid, (None,))
    out = torch.empty(len(weight), 1)
    _ssz_scales(weight.contiguous().numpy(), largest, steps, grid.float().numpy(), out.numpy())
    return out


def fake_round(weight: torch.Tensor, factor: torch.Tensor, largest: int, steps: int) -> torch.Tensor:
    """See the package docstring."""
    require_matrix("weight", weight)
    require_shape("factor", factor, (weight.shape[1],))
    out = torch.empty(weight.shape)
    _fake_round(weight.contiguous().numpy(), factor.float().contiguous().numpy(), largest, steps, out.numpy())
    return out


def round_rows(
    weight: torch.Tensor, scale: torch.Tensor, bits: int, parts: int = 1
) -> tuple[torch.Tensor, torch.Tensor, float, float]:
    """See the package docstring."""
    check_rounding(weight, scale, bits, parts)
    n, k = weight.shape
    stored = torch.empty(n // 2 if bits == 4 else n, k, dtype=torch.int8)
    sums = torch.empty(n, parts)
    error, square = _round_rows(
        weight.contiguous().numpy(), scale.float().contiguous().numpy(), bits, stored.numpy(), sums.numpy()
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
