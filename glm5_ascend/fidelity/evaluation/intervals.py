"""95 % intervals by paired bootstrap: windows are drawn with replacement, both models' values together.

Source: Efron, "Bootstrap methods" (1979). Tokens of one window depend on each other, so windows are drawn. The ends are
the 2.5 % and 97.5 % quantiles of the draws. The seed is fixed: the same values give the same interval.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

DRAWS = 10_000
#: Draws that are in memory at once: 16 MB for every thousand windows, or 24 MB with weights.
BATCH = 1000
Interval = tuple[float, float] | None


def mean_interval(values: torch.Tensor, weights: torch.Tensor | None = None) -> Interval:
    """Interval of mean(values [windows]), or of sum(values) / sum(weights); None with fewer than two windows."""
    if len(values) < 2:
        return None
    data = [tensor.double().numpy() for tensor in (values, weights) if tensor is not None]
    random, means = np.random.default_rng(0), list[NDArray[np.float64]]()
    for _ in range(0, DRAWS, BATCH):
        drawn = random.integers(0, len(values), (BATCH, len(values)))
        sums = [column[drawn].sum(axis=1) for column in data]
        means.append(sums[0] / (sums[1] if len(sums) == 2 else len(values)))
    low, high = np.percentile(np.concatenate(means), (2.5, 97.5))
    return float(low), float(high)
