"""The value up-projection in C++, where torch's product is the slower one (`head_products.per_head`)."""

from __future__ import annotations

import torch

from glm5_kernels.native.head_products import per_head
from glm5_kernels.v_up_proj import VUpProj


def v_up_proj(operands: VUpProj) -> torch.Tensor:
    return per_head(operands.latent, operands.w_uv).flatten(1)
