"""Plain torch version of the residual streams."""

from __future__ import annotations

import torch

from glm5_kernels.mhc import Mhc


def mhc(operands: Mhc) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    streams, output, post, comb, fn, scale, base, norm_weight, rms_eps, hc_eps, iterations, norm_eps = operands
    total = streams.float()
    if output is not None and post is not None and comb is not None:
        total = comb.mT @ total + post[..., None] * output.float()[:, None]
    n, row = total.shape[1], total.flatten(1)
    raw = (row * torch.rsqrt(row.square().mean(-1, keepdim=True) + rms_eps)) @ fn.T
    pre, writing, among = (
        logits * factor + offset
        for logits, factor, offset in zip(raw.split([n, n, n * n], 1), scale, base.split([n, n, n * n]), strict=True)
    )
    mixed = ((torch.sigmoid(pre) + hc_eps)[..., None] * total).sum(1)
    normed = mixed * torch.rsqrt(mixed.square().mean(-1, keepdim=True) + norm_eps) * norm_weight.float()
    matrix = sinkhorn(among.unflatten(1, (n, n)), iterations, hc_eps)
    return total, 2 * torch.sigmoid(writing), matrix, normed.to(norm_weight.dtype)


def sinkhorn(raw: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """Matrices [T, N, N] whose rows and columns add up to about 1."""
    out = raw.softmax(-1) + eps
    out = out / (out.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        out = out / (out.sum(-1, keepdim=True) + eps)
        out = out / (out.sum(-2, keepdim=True) + eps)
    return out
