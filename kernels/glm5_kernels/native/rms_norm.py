"""The RMS norm in C++ (csrc/rms_norm.h)."""

from __future__ import annotations

import torch

from glm5_kernels import rms_norm as reference
from glm5_kernels.native.library import function
from glm5_kernels.native.rows import FLOATS, LANES, NO_ROWS, ROWS, matrix
from glm5_kernels.rms_norm import RmsNorm


def rms_norm(operands: RmsNorm) -> tuple[torch.Tensor, torch.Tensor]:
    x, residual, weight, eps = operands
    rows = (x,) if residual is None else (x, residual)
    if x.dtype not in FLOATS or x.shape[1] % LANES or any(row.stride(1) != 1 for row in rows):
        return reference.rms_norm(operands)
    weight, out, total = weight.contiguous(), x.new_empty(x.shape), x if residual is None else x.new_empty(x.shape)
    added = NO_ROWS if residual is None else matrix(residual)
    function("rms_norm", 5 * ROWS + "dii")(
        *matrix(x), *added, *matrix(weight), *matrix(out), *matrix(total), eps, *x.shape
    )
    return out, total
