"""Plain torch versions of the weight rounding kernels: a pass over the weights per line."""

from __future__ import annotations

import torch

from glm5_kernels.weight_rounding import FakeRound, RoundRows, SszScale

_BLOCK = 2**19  # weights worked on at a time
NOISE = 1e-6  # relative gain below which a refit counts as converged


def ssz_scale(operands: SszScale) -> torch.Tensor:
    weight, largest, steps, grid = operands
    rows = max(1, _BLOCK // weight.shape[1])
    return torch.cat([_ssz(some, largest, steps, grid.cpu().tolist()) for some in weight.split(rows)])


def fake_round(operands: FakeRound) -> torch.Tensor:
    weight, factor, largest, steps = operands
    scaled = weight * factor
    scale = _ssz(scaled, largest, steps, [1.0]) if steps else _minmax(scaled, largest)
    return _integers(scaled, scale, largest) * scale


def round_rows(operands: RoundRows) -> tuple[torch.Tensor, torch.Tensor, float, float]:
    weight, scale, bits, parts = operands
    q = _integers(weight, scale, 2 ** (bits - 1) - 1)
    sums = q.view(len(q), parts, -1).sum(-1)
    stored = q.to(torch.int8)
    if bits == 4:
        stored = (stored[1::2] << 4) | (stored[0::2] & 0x0F)
    return stored, sums, _total(q * scale - weight), _total(weight)


def _minmax(weight: torch.Tensor, largest: int) -> torch.Tensor:
    scale = weight.abs().amax(dim=1, keepdim=True) / largest
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def _integers(weight: torch.Tensor, scale: torch.Tensor, largest: int) -> torch.Tensor:
    return torch.round(weight / scale).clamp_(-largest - 1, largest)


def _ssz(weight: torch.Tensor, largest: int, steps: int, grid: list[float]) -> torch.Tensor:
    # By a power of two, which changes no bit: sums over weights above 1e36 would overflow fp32.
    exponent = torch.frexp(weight.abs().amax(1, keepdim=True)).exponent.clamp(-100, 100)
    weight = torch.ldexp(weight, -exponent)
    start = _minmax(weight, largest)
    best, gain = start, torch.full_like(start, -1.0)
    for ratio in grid:
        best, gain, _ = _refit(weight, start * ratio, largest, best, gain, 0.0)
    for _ in range(steps):
        best, gain, improved = _refit(weight, best, largest, best, gain, NOISE)
        if not improved:
            break
    return torch.ldexp(best, exponent)


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
