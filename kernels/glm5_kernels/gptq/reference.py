"""GPTQ in plain torch: one column of all rows per step."""

from __future__ import annotations

import torch

from glm5_kernels.gptq import GptqInverseFactors, GptqRound

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
