"""Plain torch versions of the weight rounding kernels: a pass over the weights per line."""

from __future__ import annotations

import torch

from glm5_kernels.errors import KernelInputError, require_fp32, require_matrix, require_shape

_BLOCK = 2**19  # weights worked on at a time
NOISE = 1e-6  # relative gain below which a refit counts as converged


def ssz_scale(weight: torch.Tensor, largest: int, steps: int, grid: torch.Tensor) -> torch.Tensor:
    """See the package docstring."""
    require_matrix("weight", weight)
    require_fp32("grid", grid, (None,))
    rows = max(1, _BLOCK // weight.shape[1])
    return torch.cat([_ssz(some, largest, steps, grid.tolist()) for some in weight.split(rows)])


def fake_round(weight: torch.Tensor, factor: torch.Tensor, largest: int, steps: int) -> torch.Tensor:
    """See the package docstring."""
    require_matrix("weight", weight)
    require_shape("factor", factor, (weight.shape[1],))
    scaled = weight * factor
    scale = _ssz(scaled, largest, steps, [1.0]) if steps else _minmax(scaled, largest)
    return _integers(scaled, scale, largest) * scale


def round_rows(
    weight: torch.Tensor, scale: torch.Tensor, bits: int, parts: int = 1
) -> tuple[torch.Tensor, torch.Tensor, float, float]:
    """See the package docstring."""
    check_rounding(weight, scale, bits, parts)
    q = _integers(weight, scale, 2 ** (bits - 1) - 1)
    sums = q.view(len(q), parts, -1).sum(-1)
    stored = q.to(torch.int8)
    if bits == 4:
        stored = (stored[1::2] << 4) | (stored[0::2] & 0x0F)
    return stored, sums, _total(q * scale - weight), _total(weight)


def check_rounding(weight: torch.Tensor, scale: torch.Tensor, bits: int, parts: int) -> None:
    """Raise `KernelInputError` unless the arguments of `round_rows` fit."""
    require_matrix("weight", weight)
    require_fp32("scale", scale, (len(weight), 1))
    if bits not in (4, 8) or (bits == 4 and len(weight) % 2) or parts < 1 or weight.shape[1] % parts:
        raise KernelInputError(f"cannot round {list(weight.shape)} to {bits} bits with {parts} partial sums")


def _minmax(weight: torch.Tensor, largest: int) -> torch.Tensor:
    scale = weight.abs().amax(dim=1, keepdim=True) / largest
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def _integers(weight: torch.Tensor, scale: torch.Tensor, largest: int) -> torch.Tensor:
    return torch.round(weight / scale).clamp_(-largest - 1, largest)


def _ssz(weight: torch.Tensor, largest: int, steps: int, grid: list[float]) -> torch.Tensor:
    start = _minmax(weight, largest)
    best, gain = start, torch.full_like(start, -1.0)
    for ratio in grid:
        best, gain, _ = _refit(weight, start * ratio, largest, best, gain, 0.0)
    for _ in range(steps):
        best, gain, improved = _refit(weight, best, largest, best, gain, NOISE)
        if not improved:
            break
    return best


def _refit(
    weight: torch.Tensor, scale: torch.Tensor, largest: int, best: torch.Tensor, gain: torch.Tensor, noise: float
) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Rows whose refit at `scale` gains more than before by `noise` take the refitted scale."""
    q = _integers(weight, scale, largest)
    along, energy = (weight * q).sum(1, keepdim=True), q.square().sum(1, keepdim=True)
    new = along.square() / energy.clamp_min(1.0)
    better = (new > gain * (1 + noise)) & (energy > 0)
    return torch.where(better, along / energy, best), torch.where(better, new, gain), bool(better.any())


def _total(x: torch.Tensor) -> float:
    """Sum of squares, in float64 from row to row; an NPU has none."""
    return float(x.square().sum(1).cpu().double().sum())
