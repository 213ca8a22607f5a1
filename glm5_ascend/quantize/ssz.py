"""SSZ: the scale of a row of weights that loses least, found on sorted weights.

Source of the method: msModelSlim 26.1.0 (`ssz`: integers for a fixed scale and the least-squares scale for fixed
integers, in turns). Here a row is sorted once; the sums over its integers for any scale are then differences of prefix
sums at the edges between integers: some binary searches instead of a pass over the weights.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

_GRID = torch.linspace(0.2, 1.0, 24)  # below 0.2 nothing is gained, above it heavy-tailed rows lose
_BLOCK = 2**19  # weights worked on at a time: what fits the processor's cache is read from memory once
_NOISE = 1e-6  # relative gain below which an iteration counts as converged


def minmax_scale(weight: torch.Tensor, largest: int) -> torch.Tensor:
    """max|row| / largest, [N, 1]; 1 for a row of zeros (its integers are zero whatever the scale)."""
    peak = torch.maximum(weight.amax(dim=1, keepdim=True), -weight.amin(dim=1, keepdim=True))
    return torch.where(peak > 0, peak / largest, torch.ones_like(peak))


def ssz_scale(weight: torch.Tensor, largest: int, steps: int = 8, grid: torch.Tensor | None = _GRID) -> torch.Tensor:
    """Per-row scale [N, 1] that minimises the squared error of symmetric integers [-largest-1, largest].

    Starts from the best of a `grid` of clipped min-max scales (None: the min-max scale itself), then alternates
    integers for fixed scale and least-squares scale for fixed integers while any row's error falls, at most `steps`
    times.

    Args:
        weight: fp32 [N, K].
    """
    at = weight.cpu()  # float64 sums: an NPU has none
    ratios = torch.ones(1) if grid is None else grid
    rows = max(1, _BLOCK // weight.shape[1])
    return torch.cat([_best_scale(some, largest, steps, ratios) for some in at.split(rows)]).to(weight.device)


def _best_scale(weight: torch.Tensor, largest: int, steps: int, ratios: torch.Tensor) -> torch.Tensor:
    rows = SortedRows(weight, largest)
    scales, gains = rows.refit(minmax_scale(weight, largest) * ratios)
    gain, at = gains.max(dim=1, keepdim=True)
    best = scales.gather(1, at)
    for _ in range(steps):
        scale, new = rows.refit(best)
        better = new > gain * (1 + _NOISE)
        if not bool(better.any()):
            break
        best, gain = torch.where(better, scale, best), torch.where(better, new, gain)
    return best


class SortedRows:
    """Rows [N, K] on the host of which the sums over integers are wanted for many scales."""

    def __init__(self, weight: torch.Tensor, largest: int) -> None:
        self.values = torch.from_numpy(np.sort(weight.numpy(), axis=1))  # vectorised: 25 times as quick as torch's
        self.lowest = -largest - 1
        #: Edge k - 1/2 lies between the integers k - 1 and k.
        self.edges = torch.arange(-largest, largest + 1) - 0.5
        sums = self.values.cumsum(dim=1, dtype=torch.float64)
        self.below = F.pad(sums, (1, 0))  # [N, K + 1]: sum of the n smallest
        self.total = sums[:, -1:]

    def refit(self, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """For the integers q that `scale` [N, C] gives: the least-squares scale `sum(wq) / sum(q^2)` for them, and
        `sum(wq)^2 / sum(q^2)`, by which the squared error with that scale is less than `sum(w^2)`.
        """
        edges = scale[:, :, None] * self.edges
        shape, flat = edges.shape, edges.flatten(1)
        position = torch.searchsorted(self.values, flat)
        # q = lowest + the number of edges below w: sums over q become sums over edges of what lies above each.
        above = (self.total - self.below.gather(1, position)).view(shape)
        count = (self.values.shape[1] - position).view(shape)
        along = self.lowest * self.total + above.sum(-1)
        energy = self.lowest**2 * self.values.shape[1] + (count * (2 * self.edges).to(along.dtype)).sum(
            -1
        )  # k^2 - (k-1)^2 = 2k - 1
        some = energy > 0
        energy = energy.clamp_min(1)
        return torch.where(some, (along / energy).to(scale.dtype), scale), along.square() / energy
