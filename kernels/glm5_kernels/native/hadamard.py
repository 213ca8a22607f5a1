"""The Hadamard transform in C++ (csrc/hadamard.h); sizes too small for sixteen lanes are left to the reference."""

from __future__ import annotations

import torch

from glm5_kernels import hadamard as reference
from glm5_kernels.hadamard import Hadamard, core_order
from glm5_kernels.native.library import function
from glm5_kernels.native.rows import LANES


def hadamard(operands: Hadamard) -> torch.Tensor:
    x, weight, dim = operands
    n = len(weight)
    order = core_order(n)
    if (dim == 1 and n // order < LANES) or (dim == 0 and x.shape[1] % LANES) or x.stride(1) != 1:
        return reference.hadamard(operands)
    core, scaled = reference.core_matrix(order).T.contiguous(), (weight / n**0.5).contiguous()
    function("hadamard", "piii" + "pi" + "pii")(
        x.data_ptr(), x.stride(0), *x.shape, scaled.data_ptr(), n, core.data_ptr(), order, dim
    )
    return x
