"""Plain torch version of the RMS norm."""

from __future__ import annotations

import torch

from glm5_kernels.rms_norm import RmsNorm


def rms_norm(operands: RmsNorm) -> tuple[torch.Tensor, torch.Tensor]:
    x, residual, weight, eps = operands
    total = x.float() if residual is None else x.float() + residual.float()
    quotient = total * torch.rsqrt(total.square().mean(dim=-1, keepdim=True) + eps)
    return quotient.to(x.dtype) * weight, x if residual is None else total.to(x.dtype)
