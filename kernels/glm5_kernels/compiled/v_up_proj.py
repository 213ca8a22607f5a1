"""The value up-projection compiled, where torch's product is the slower one (`fp32_product.per_head`)."""

from __future__ import annotations

import torch

from glm5_kernels.compiled.fp32_product import bind_per_head, per_head
from glm5_kernels.v_up_proj.reference import check
from glm5_kernels.workspace import Bound, Workspace


def v_up_proj(latent: torch.Tensor, w_uv: torch.Tensor) -> torch.Tensor:
    """See the package docstring."""
    check(latent, w_uv)
    return per_head(latent, w_uv).flatten(1)


def bind(latent: torch.Tensor, w_uv: torch.Tensor, room: Workspace) -> Bound:
    """`v_up_proj` bound to its operands."""
    check(latent, w_uv)
    out = room.tensor("values", (*latent.shape[:2], w_uv.shape[2]), latent.dtype)
    return Bound([bind_per_head(latent, w_uv, out)], (out.flatten(1),), latent, w_uv)
