"""Error feedback in plain torch: a column of all rows per step."""

from __future__ import annotations

import torch

from glm5_kernels.errors import KernelInputError, require_fp32, require_matrix, require_shape

_BLOCK = 64  # columns that leave the inverse at a time


def feedback_gains(inputs: torch.Tensor, damping: float) -> torch.Tensor:
    """See the package docstring.

    From the last column to the first: P = (damping I + X_F X_F^T)^-1 loses a rank-one term as a column joins F. A block
    of columns joins by the Cholesky factor of I + X_B^T P X_B, whose diagonal turns the terms back into gains.
    """
    if damping <= 0 or inputs.dim() != 2:
        raise KernelInputError(f"feedback needs inputs [K, n] and damping > 0, got {list(inputs.shape)}, {damping}")
    columns, n = inputs.shape
    inverse = torch.eye(n, dtype=torch.float64, device=inputs.device) / damping
    gains = torch.empty_like(inputs)
    for stop in range(columns, 0, -_BLOCK):
        start = max(0, stop - _BLOCK)
        joining = inputs[start:stop].flip(0).double().T
        turned = inverse @ joining
        inner = torch.eye(stop - start, dtype=torch.float64, device=inputs.device) + joining.T @ turned
        lower = torch.linalg.cholesky(inner)
        terms = torch.linalg.solve_triangular(lower, turned.T, upper=False)
        gains[start:stop] = (terms * lower.diagonal()[:, None]).flip(0).float()
        inverse -= terms.T @ terms
    return gains


def round_with_feedback(
    weight: torch.Tensor,
    scale: torch.Tensor,
    largest: int,
    order: torch.Tensor,
    inputs: torch.Tensor,
    gains: torch.Tensor,
    damping: float,
    passes: int,
    refit: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the package docstring."""
    check(weight, scale, order, inputs, gains)
    weight, scale = weight[:, order], scale.clone()
    q = torch.empty_like(weight)
    carried = weight.new_zeros(len(weight), inputs.shape[1])
    for k in range(weight.shape[1]):
        w = weight[:, k] + carried @ inputs[k]
        q[:, k] = _integers(w / scale[:, 0], largest)
        carried += (w - q[:, k] * scale[:, 0])[:, None] * gains[k]
    if not passes:
        return _as_before(q, order), scale
    wanted = weight @ inputs
    curvature = inputs.square().sum(1) + damping
    for _ in range(passes):
        if refit:
            scale = _refit(weight, q, scale, wanted, q @ inputs, damping)
        left = wanted - scale * (q @ inputs)
        for k in range(weight.shape[1]):
            step = (left @ inputs[k] + damping * (weight[:, k] - q[:, k] * scale[:, 0])) / curvature[k]
            better = _integers(q[:, k] + step / scale[:, 0], largest)
            left += ((q[:, k] - better) * scale[:, 0])[:, None] * inputs[k]
            q[:, k] = better
    if refit:
        scale = _refit(weight, q, scale, wanted, q @ inputs, damping)
    return _as_before(q, order), scale


def check(
    weight: torch.Tensor, scale: torch.Tensor, order: torch.Tensor, inputs: torch.Tensor, gains: torch.Tensor
) -> None:
    """Raise `KernelInputError` unless the shapes fit and `order` is one."""
    require_matrix("weight", weight)
    for name, tensor in {"scale": scale, "inputs": inputs, "gains": gains}.items():
        require_fp32(name, tensor, (None, None))
    require_shape("scale", scale, (len(weight), 1))
    require_shape("inputs", inputs, (weight.shape[1], None))
    require_shape("gains", gains, tuple(inputs.shape))
    require_shape("order", order, (weight.shape[1],))
    columns = torch.arange(weight.shape[1], device=order.device)
    if order.dtype != torch.int64 or not torch.equal(order.sort().values, columns):
        raise KernelInputError(f"order must be int64 and name every one of {len(columns)} columns once")


def _as_before(q: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(q).index_copy_(1, order, q)


def _integers(x: torch.Tensor, largest: int) -> torch.Tensor:
    return torch.round(x).clamp_(-largest - 1, largest)


def _refit(
    weight: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, wanted: torch.Tensor, got: torch.Tensor, damping: float
) -> torch.Tensor:
    """The scale with the least cost for the integers q; rows for which there is none above 0 keep theirs."""
    along = (got * wanted).sum(1, keepdim=True) + damping * (weight * q).sum(1, keepdim=True)
    energy = got.square().sum(1, keepdim=True) + damping * q.square().sum(1, keepdim=True)
    return torch.where((along > 0) & (energy > 0), along / energy.clamp_min(1e-30), scale)
