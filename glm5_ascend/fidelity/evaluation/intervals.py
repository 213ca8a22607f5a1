"""95 % intervals by paired bootstrap: windows (or prompts) are drawn with replacement, both models' values together.

Source: Efron, "Bootstrap methods" (1979); tokens of one window depend on each other, so windows are what is drawn.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

DRAWS = 10_000
#: Draws for statistics that need all positions of a draw, not only the windows' means.
FEW_DRAWS = 400
Interval = tuple[float, float] | None


def mean_interval(values: torch.Tensor, weights: torch.Tensor | None = None) -> Interval:
    """Of the mean of `values` [windows], or of sum(values) / sum(weights); None with fewer than two windows."""
    if len(values) < 2:
        return None
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(len(values), (DRAWS, len(values)), generator=generator)
    means = values[picks].mean(1) if weights is None else values[picks].sum(1) / weights[picks].sum(1)
    return _middle(means)


def interval(values: torch.Tensor, statistic: Callable[[torch.Tensor], torch.Tensor]) -> Interval:
    """Of any statistic of all positions of `values` [windows, positions]."""
    if len(values) < 2:
        return None
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(len(values), (FEW_DRAWS, len(values)), generator=generator)
    return _middle(torch.stack([statistic(values[pick].flatten()) for pick in picks]))


def _middle(draws: torch.Tensor) -> tuple[float, float]:
    low, high = draws.double().quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high
