"""Plain torch version of the int8 linear layer."""

from __future__ import annotations

from collections.abc import Callable

import torch

from glm5_kernels.errors import require_floats
from glm5_kernels.int8 import LinearWeights, apply_linear, check_linear


def int8_linear(
    x: torch.Tensor,
    w: LinearWeights,
    apply: Callable[[torch.Tensor, LinearWeights, torch.dtype], torch.Tensor] = apply_linear,
) -> torch.Tensor:
    """See the package docstring."""
    check(x, w)
    if x.dim() == 2:
        return apply(x, w, x.dtype)
    rows = x.reshape(-1, x.shape[-1])
    return apply(rows, w, x.dtype).reshape(*x.shape[:-1], w.weight.shape[0])


def check(x: torch.Tensor, w: LinearWeights) -> None:
    """Raise `KernelInputError` unless the operands fit the contract."""
    require_floats(x=x)
    check_linear("w", w, None, x.shape[-1])
