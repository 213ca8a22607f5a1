"""Plain torch version of the value up-projection."""

from __future__ import annotations

import torch

from glm5_kernels.errors import KernelInputError, require_device, require_floats, require_shape


def v_up_proj(latent: torch.Tensor, w_uv: torch.Tensor) -> torch.Tensor:
    check(latent, w_uv)
    values = torch.bmm(latent.float().transpose(0, 1), w_uv.float())  # [H, T, v_head_dim]
    return values.transpose(0, 1).reshape(len(latent), latent.shape[1] * w_uv.shape[2]).to(latent.dtype)


def check(latent: torch.Tensor, w_uv: torch.Tensor) -> None:
    """Raise `KernelInputError` unless the operands fit the contract."""
    require_shape("latent", latent, (None, None, None))
    require_shape("w_uv", w_uv, (*latent.shape[1:], None))
    require_floats(latent=latent, w_uv=w_uv)
    require_device(latent, w_uv=w_uv)
    if latent.dtype != w_uv.dtype:
        raise KernelInputError(f"w_uv is {w_uv.dtype}, latent is {latent.dtype}: expected the same")
