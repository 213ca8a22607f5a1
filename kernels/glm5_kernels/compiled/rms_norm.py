"""The RMS norm compiled: one pass over a row in a cache instead of ten operators of torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import float32

from glm5_kernels.compiled.int8_quantize import FLOATS
from glm5_kernels.compiled.jit import inner, kernel
from glm5_kernels.compiled.rows import load_row_as_fp32, matrix_address, store_row_as
from glm5_kernels.compiled.simd import STEP, WIDTH, aligned_fp32
from glm5_kernels.compiled.threads import run_ranges
from glm5_kernels.rms_norm import RmsNorm, reference

#: Tokens of a task.
_TOKENS = 32


def rms_norm(operands: RmsNorm) -> tuple[torch.Tensor, torch.Tensor]:
    x, residual, weight, eps = operands
    columns, rows = x.shape[1], [one for one in (x, residual, weight[None]) if one is not None]
    if x.dtype not in FLOATS or columns % WIDTH or not len(x) or any(one.stride(-1) != 1 for one in rows):
        return reference.rms_norm(operands)
    out, total = torch.empty_like(x), x if residual is None else torch.empty_like(x)
    added = x if residual is None else residual
    addresses = [matrix_address(one) for one in (x, added, weight[None], out, total)]
    run_ranges(_rows, len(x), _TOKENS, columns, int(residual is not None), eps, *addresses)
    return out, total


@kernel
def _rows(
    first: Any, last: Any, columns: Any, adds: Any, eps: Any, x: Any, residual: Any, weight: Any, out: Any, total: Any
) -> None:
    """out and total (if `adds`) <- rows first..last of x and residual."""
    row, other, factors = aligned_fp32(columns), aligned_fp32(columns), aligned_fp32(columns)
    load_row_as_fp32(weight.base, columns, weight.kind, factors.ctypes.data, STEP)
    for token in range(first, last):
        load_row_as_fp32(x.base + token * x.row_pitch, columns, x.kind, row.ctypes.data, STEP)
        if adds:
            load_row_as_fp32(residual.base + token * residual.row_pitch, columns, x.kind, other.ctypes.data, STEP)
            for column in range(columns):
                row[column] += other[column]
            store_row_as(row.ctypes.data, columns, x.kind, total.base + token * total.row_pitch)
        factor, target = rms_factor(row, 0, columns, eps), out.base + token * out.row_pitch
        for column in range(columns):
            row[column] *= factor
        store_row_as(row.ctypes.data, columns, x.kind, target)  # rounds
        load_row_as_fp32(target, columns, x.kind, row.ctypes.data, STEP)
        for column in range(columns):
            row[column] *= factors[column]
        store_row_as(row.ctypes.data, columns, x.kind, target)


@inner
def rms_factor(x: Any, first: Any, size: Any, eps: Any) -> Any:
    """1 / sqrt(mean(x^2) + eps) of `size` fp32 of x from `first` on; squares are added in 16 lanes."""
    lanes = np.zeros(WIDTH, np.float32)
    for start in range(first, first + size, WIDTH):
        for lane in range(WIDTH):
            lanes[lane] += x[start + lane] * x[start + lane]
    total = float32(0)
    for lane in range(WIDTH):
        total += lanes[lane]
    return float32(1) / np.sqrt(total / float32(size) + float32(eps))
