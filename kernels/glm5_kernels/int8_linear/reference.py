"""Plain torch version of the int8 linear layer."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from glm5_kernels.int8 import LinearWeights, apply_linear
from glm5_kernels.int8_linear import Int8Linear


def int8_linear(
    operands: Int8Linear,
    apply: Callable[[torch.Tensor, LinearWeights, torch.dtype], torch.Tensor] = apply_linear,
) -> torch.Tensor:
    x, w = operands
    if x.ndim == 2:
        return apply(x, w, x.dtype)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return apply(rows, w, x.dtype).reshape(*x.shape[:-1], len(w.weight))
