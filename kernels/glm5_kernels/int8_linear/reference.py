"""Plain torch version of the int8 linear layer."""

from __future__ import annotations

from collections.abc import Callable

import torch

from glm5_kernels.errors import require_shape
from glm5_kernels.int8 import LinearWeights, apply_linear


def int8_linear(
    x: torch.Tensor,
    w: LinearWeights,
    apply: Callable[[torch.Tensor, LinearWeights, torch.dtype], torch.Tensor] = apply_linear,
) -> torch.Tensor:
    """See the package docstring."""
    require_shape("weight", w.weight, (None, x.shape[-1]))
    rows = x.reshape(-1, x.shape[-1])
    return apply(rows, w, x.dtype).reshape(*x.shape[:-1], w.weight.shape[0])
