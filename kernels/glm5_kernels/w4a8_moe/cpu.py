"""The routed experts with our own int8 product where a library's is slow: for the few tokens an expert gets."""

from __future__ import annotations

import torch

from glm5_kernels import vnni
from glm5_kernels.w4a8_moe import reference


def w4a8_moe(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
) -> torch.Tensor:
    """See the package docstring."""
    return reference.w4a8_moe(x, topk_weights, topk_ids, w13, w13_scale, w2, w2_scale, vnni.matmul)
