"""The RMS norm in C++ (csrc/rms_norm.h)."""

from __future__ import annotations

import torch

from glm5_kernels.native.library import function
from glm5_kernels.native.rows import DTYPES, FLOATS, LANES
from glm5_kernels.rms_norm import RmsNorm, reference


def rms_norm(operands: RmsNorm) -> tuple[torch.Tensor, torch.Tensor]:
    x, residual, weight, eps = operands
    tokens, columns = x.shape
    rows = (x,) if residual is None else (x, residual)
    if x.dtype not in FLOATS or columns % LANES or any(row.stride(1) != 1 for row in rows):
        return reference.rms_norm(operands)
    weight = weight.contiguous()
    out, total = x.new_empty(x.shape), x if residual is None else x.new_empty(x.shape)
    added = (None, 0, None) if residual is None else (residual.data_ptr(), residual.stride(0), total.data_ptr())
    function("rms_norm", "pipipiiifpp")(
        x.data_ptr(), x.stride(0), *added[:2], weight.data_ptr(), tokens, columns, DTYPES[x.dtype], eps,
        out.data_ptr(), added[2],
    )  # fmt: skip
    return out, total
