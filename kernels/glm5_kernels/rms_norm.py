"""RMS norm of rows, after the residual is added if there is one.

    s   = x + residual                       fp32; residual' is s in x's dtype
    out = s / sqrt(mean(s^2) + eps) * weight

The quotient is rounded to x's dtype before it is multiplied, as in vLLM and transformers.

Source: Zhang and Sennrich (arXiv 1910.07467); vLLM `ir/ops/layernorm.py` (semantics).
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor


class RmsNorm(NamedTuple):
    """out and residual', both [T, D] in x's dtype; without a residual, residual' is x."""

    x: Annotated[Tensor, "float [T, D]"]
    residual: Annotated[Tensor | None, "x [T, D]"]
    weight: Annotated[Tensor, "x [D]"]
    eps: float


def rms_norm(operands: RmsNorm) -> tuple[torch.Tensor, torch.Tensor]:
    x, residual, weight, eps = operands
    total = x.float() if residual is None else x.float() + residual.float()
    quotient = total * torch.rsqrt(total.square().mean(dim=-1, keepdim=True) + eps)
    return quotient.to(x.dtype) * weight, x if residual is None else total.to(x.dtype)
