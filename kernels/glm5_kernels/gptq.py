"""GPTQ: round a weight column by column, and let later columns compensate the error of earlier ones on given inputs.

A row w of the weight, its integers q and its scale s should keep the row's outputs on the inputs X [n, K]:

    cost = |X w - s X q|^2 + damping |w - s q|^2 = (w - s q)^T H (w - s q),    H = X^T X + damping I  [K, K]

First pass: columns are rounded in the order `perm`. The error e of the column just rounded is compensated by the free
columns F: w_F += X_F^T h e with h = (damping I + X_F X_F^T)^-1 x. This is GPTQ's update by Hinv, in the space of the n
inputs instead of the K x K Hessian: cheaper if n < K. Then `passes` times: the best scale for the integers (only with
`refit`), and for each column the best integer while all others stay (coordinate descent).

Rows do not influence each other: the same bits for any number of threads and any split into multiples of 16 rows.
Source: GPTQ (arXiv 2210.17323), LDLQ (arXiv 2307.13304); the low-rank form by the matrix inversion lemma is ours.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from glm5_kernels.errors import KernelInputError


class GptqInverseFactors(NamedTuple):
    """h fp32 [K, n] of every column, if the later columns are free."""

    inputs: Annotated[Tensor, "fp32 [K, n]"]  # X transposed, in the order of rounding
    damping: float

    def rules(self) -> None:
        if self.damping <= 0:
            raise KernelInputError(f"GPTQ needs damping > 0, got {self.damping}")


class GptqRound(NamedTuple):
    """Integers (whole numbers in fp32 [N, K]) and scale fp32 [N, 1], which only `refit` changes."""

    weight: Annotated[Tensor, "fp32 [N, K]"]
    scale: Annotated[Tensor, "fp32 [N, 1]"]  # > 0
    largest: int  # 7 for INT4, 127 for INT8; integers lie in -largest - 1 .. largest, ties go to even
    perm: Annotated[Tensor, "int64 [K]"]  # every column once: the first one to round, the second one, ...
    inputs: Annotated[Tensor, "fp32 [K, n]"]  # X transposed, permuted: row k holds the inputs of column perm[k]
    hinv_factors: Annotated[Tensor, "fp32 [K, n]"]  # of `GptqInverseFactors`, permuted
    damping: float
    passes: int
    refit: bool

    def rules(self) -> None:
        columns = self.weight.shape[1]
        if not columns:
            raise KernelInputError(f"weight has shape {list(self.weight.shape)}, expected at least one column")

    def check_values(self) -> None:
        columns = self.weight.shape[1]
        if not torch.equal(self.perm.sort().values, torch.arange(columns, device=self.perm.device)):
            raise KernelInputError(f"perm must name every one of {columns} columns once")


_BLOCK = 64  # columns added to the inverse at a time


def gptq_inverse_factors(operands: GptqInverseFactors) -> torch.Tensor:
    """h of every column, from the last one to the first.

    P = (damping I + X_F X_F^T)^-1 loses a rank-one term as a column joins F. A block
    of columns joins by the Cholesky factor of I + X_B^T P X_B, whose diagonal scales the terms back.
    """
    inputs, damping = operands
    columns, n = inputs.shape
    inverse = torch.eye(n, dtype=torch.float64, device=inputs.device) / damping
    factors = torch.empty_like(inputs)
    for stop in range(columns, 0, -_BLOCK):
        start = max(0, stop - _BLOCK)
        x = inputs[start:stop].flip(0).double().T
        projected = inverse @ x
        gram = torch.eye(stop - start, dtype=torch.float64, device=inputs.device) + x.T @ projected
        lower = torch.linalg.cholesky(gram)
        terms = torch.linalg.solve_triangular(lower, projected.T, upper=False)
        factors[start:stop] = (terms * lower.diagonal()[:, None]).flip(0).float()
        inverse -= terms.T @ terms
    return factors


def gptq_round(operands: GptqRound) -> tuple[torch.Tensor, torch.Tensor]:
    weight, scale, largest, perm, inputs, hinv_factors, damping, passes, refit = operands
    weight, scale = weight[:, perm], scale.clone()
    q = torch.empty_like(weight)
    error_on_inputs = weight.new_zeros(len(weight), inputs.shape[1])
    for k in range(weight.shape[1]):
        w = weight[:, k] + error_on_inputs @ inputs[k]
        q[:, k] = _integers(w / scale[:, 0], largest)
        error_on_inputs += (w - q[:, k] * scale[:, 0])[:, None] * hinv_factors[k]
    if not passes:
        return _unpermuted(q, perm), scale
    outputs = weight @ inputs
    curvature = inputs.square().sum(1) + damping
    for _ in range(passes):
        if refit:
            scale = _refit(weight, q, scale, outputs, q @ inputs, damping)
        residual = outputs - scale * (q @ inputs)
        for k in range(weight.shape[1]):
            step = (residual @ inputs[k] + damping * (weight[:, k] - q[:, k] * scale[:, 0])) / curvature[k]
            better = _integers(q[:, k] + step / scale[:, 0], largest)
            residual += ((q[:, k] - better) * scale[:, 0])[:, None] * inputs[k]
            q[:, k] = better
    if refit:
        scale = _refit(weight, q, scale, outputs, q @ inputs, damping)
    return _unpermuted(q, perm), scale


def _unpermuted(q: torch.Tensor, perm: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(q).index_copy_(1, perm, q)


def _integers(x: torch.Tensor, largest: int) -> torch.Tensor:
    return torch.round(x).clamp_(-largest - 1, largest)


def _refit(
    weight: torch.Tensor,
    q: torch.Tensor,
    scale: torch.Tensor,
    outputs: torch.Tensor,
    rounded_outputs: torch.Tensor,
    damping: float,
) -> torch.Tensor:
    """The scale with the least cost for the integers q; a row without a positive one keeps its scale."""
    numerator = (rounded_outputs * outputs).sum(1, keepdim=True) + damping * (weight * q).sum(1, keepdim=True)
    denominator = rounded_outputs.square().sum(1, keepdim=True) + damping * q.square().sum(1, keepdim=True)
    return torch.where((numerator > 0) & (denominator > 0), numerator / denominator.clamp_min(1e-30), scale)
