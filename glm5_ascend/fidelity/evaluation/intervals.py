"""95 % intervals by paired bootstrap: windows (or prompts) are drawn with replacement, both models' values together.

Source: Efron, "Bootstrap methods" (1979). Tokens of one window depend on each other, so windows are drawn. The ends are
the 2.5 % and 97.5 % quantiles of the draws. The seed is fixed: the same values give the same interval.
"""

from __future__ import annotations

from typing import Any

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
    from scipy.stats import bootstrap  # late: half a second

    data = [tensor.double().numpy() for tensor in (values, weights) if tensor is not None]
    options: dict[str, Any] = {"n_resamples": DRAWS, "batch": BATCH, "vectorized": True, "method": "percentile"}
    result = bootstrap(data, _ratio, paired=True, rng=np.random.default_rng(0), **options)
    low, high = result.confidence_interval
    return float(low), float(high)


def _ratio(values: NDArray[np.float64], *weights: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
    mean: NDArray[np.float64] = values.mean(axis)
    return mean / weights[0].mean(axis) if weights else mean
