"""Plain torch version of the value up-projection."""

from __future__ import annotations

import torch

from glm5_kernels.v_up_proj import VUpProj


def v_up_proj(operands: VUpProj) -> torch.Tensor:
    latent, w_uv = operands
    values = torch.bmm(latent.float().transpose(0, 1), w_uv.float())  # [H, T, v_head_dim]
    return values.transpose(0, 1).reshape(len(latent), latent.shape[1] * w_uv.shape[2]).to(latent.dtype)
