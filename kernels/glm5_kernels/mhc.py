"""Residual streams (mHC, manifold-constrained hyper-connections) between two halves of a transformer's layers.

N streams x [N, D] of a token take the place of its one residual. A half reads a mixture of them; its output y [D] is
added to all of them, which mix by a doubly stochastic matrix. For each token, in fp32:

    x[m]    = sum_n comb[n, m] x[n] + post[m] * y                 of the half before; without an output x stays
    raw     = fn (x / sqrt(mean(x^2) + rms_eps))                  x as one row [N * D]
    pre     = sigmoid(scale[0] * raw[:N] + base[:N]) + hc_eps
    post'   = 2 sigmoid(scale[1] * raw[N:2N] + base[N:2N])
    comb'   = sinkhorn(scale[2] * raw[2N:] + base[2N:])           [N, N]
    input   = rms_norm(sum_n pre[n] x[n], norm_eps) * norm_weight rounded to norm_weight's dtype

sinkhorn: softmax of each row, plus hc_eps; columns divided by their sum + hc_eps; then sinkhorn_iters - 1 times rows
and columns divided so. A NaN or an infinity stays within its token; without an output x' is x.

Source: arXiv 2512.24880; transformers 5.19 `modeling_glm5_next.py`, behaviour, not code.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from glm5_kernels.contract import require_shape
from glm5_kernels.errors import KernelInputError


class Mhc(NamedTuple):
    """x' [T, N, D], post' [T, N] and comb' [T, N, N] in fp32, and the input [T, D] in norm_weight's dtype."""

    streams: Annotated[Tensor, "float [T, N, D]"]
    output: Annotated[Tensor | None, "float [T, D]"]
    post: Annotated[Tensor | None, "fp32 [T, N]"]  # this and comb are there if an output is
    comb: Annotated[Tensor | None, "fp32 [T, N, N]"]
    fn: Annotated[Tensor, "fp32 [maps, row]"]  # [N * (N + 2), N * D]
    scale: Annotated[Tensor, "fp32 [3]"]
    base: Annotated[Tensor, "fp32 [maps]"]
    norm_weight: Annotated[Tensor, "float [D]"]
    rms_eps: float
    hc_eps: float
    sinkhorn_iters: int
    norm_eps: float

    def rules(self) -> None:
        _, n, columns = self.streams.shape
        if not n or not columns:
            raise KernelInputError(f"streams has shape {list(self.streams.shape)}, expected streams and columns")
        require_shape("fn", self.fn, (n * (n + 2), n * columns))
        if len({operand is None for operand in (self.output, self.post, self.comb)}) > 1:
            raise KernelInputError("output, post and comb belong together: give all of them or none")
        if self.sinkhorn_iters < 1:
            raise KernelInputError(f"sinkhorn_iters is {self.sinkhorn_iters}, expected 1 or more")


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
