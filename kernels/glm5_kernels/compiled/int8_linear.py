"""The int8 linear layer compiled (`int8_product`); the same numbers as the reference."""

from __future__ import annotations

from functools import partial

import torch

from glm5_kernels.compiled.int8_product import apply_linear, bind_linear
from glm5_kernels.errors import KernelInputError, require_shape
from glm5_kernels.int8 import LinearWeights
from glm5_kernels.int8_linear import reference
from glm5_kernels.workspace import Bound, Workspace

int8_linear = partial(reference.int8_linear, apply=apply_linear)


def bind(x: torch.Tensor, w: LinearWeights, out: torch.Tensor, room: Workspace) -> Bound:
    """`int8_linear` of x [T, K] to out [T, N], in x's dtype and contiguous, bound to its operands."""
    reference.check(x, w)
    require_shape("out", out, (len(x), len(w.weight)))
    if out.dtype != x.dtype or not out.is_contiguous():
        raise KernelInputError(f"out is {out.dtype}, expected {x.dtype}, and contiguous")
    return Bound([bind_linear(x, w, out, room)], (out,), x, w)
