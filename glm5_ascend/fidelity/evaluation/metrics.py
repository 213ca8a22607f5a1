"""Per-position values -> the figures that are reported.

Flips as in "Accuracy is Not All You Need" (Dutta et al., arXiv 2407.09141): answers that change from right to wrong
or from wrong to right. Teacher-forced, an answer is the most probable next token, and the true one is right. Top-1
agreement also counts one wrong token exchanged for another: 1 - top-1 agreement is never below the flip rate.

95 % intervals by paired bootstrap (Efron, "Bootstrap methods", 1979): windows are drawn with replacement, both models'
values together, because tokens of one window depend on each other. The ends are the 2.5 % and 97.5 % quantiles of the
draws. The seed is fixed: the same values give the same interval.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from glm5_ascend.fidelity.evaluation.compare import FidelityComparison

#: Formats of figures.
SHARE, CHANGE, DIFFERENCE = ".2%", "+.2%", "+.6f"
DRAWS = 10_000
#: Draws that are in memory at once: 16 MB for every thousand windows, or 24 MB with weights.
BATCH = 1000
Interval = tuple[float, float] | None


@dataclass(frozen=True)
class Metric:
    """One figure with its 95 % interval.

    Attributes:
        name: key in `--json`.
        label: name for the reader.
        format: format specification of the value and the ends of the interval.
    """

    name: str
    label: str
    value: float
    interval: Interval = None
    format: str = ".6f"

    @property
    def text(self) -> str:
        return format(self.value, self.format)

    @property
    def interval_text(self) -> str:
        """The interval in brackets, "" where there is none."""
        if self.interval is None:
            return ""
        low, high = (format(end, self.format) for end in self.interval)
        return f"[{low}, {high}]"


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


def mean_metric(name: str, label: str, values: torch.Tensor, format: str = ".6f") -> Metric:
    """The mean of values [windows] or [windows, positions]; the interval draws windows."""
    by_window = values.mean(1) if values.ndim == 2 else values
    return Metric(name, label, float(values.mean()), mean_interval(by_window), format)


def p99(values: torch.Tensor) -> torch.Tensor:
    """The 99th percentile by nearest rank: the smallest value that 99 % of all do not exceed."""
    return values.kthvalue(-(-99 * len(values) // 100))[0]  # torch.quantile refuses more than 2^24 values


def metrics(comparison: FidelityComparison) -> list[Metric]:
    """All figures of a comparison."""
    kl, reference, quantized = comparison.kl, comparison.nll_reference, comparison.nll_quantized
    delta = quantized - reference
    flips = (comparison.right_reference != comparison.right_quantized).double()
    bound = " (lower bound)" if comparison.kl_is_bound else ""
    change = float(delta.mean() / reference.mean())
    change_interval = mean_interval(delta.mean(1), reference.mean(1))
    rows = [
        mean_metric("kl_mean", f"KL to the reference, mean{bound}", kl),
        Metric("kl_p99", f"KL, 99th percentile{bound}", float(p99(kl.flatten()))),
        Metric("kl_max", f"KL, maximum{bound}", float(kl.max())),
        mean_metric("top1_agreement", "same top-1", comparison.same_top1.double(), SHARE),
        mean_metric("flip_rate", "flips", flips, SHARE),
        mean_metric("nll_source", "NLL, reference", reference),
        mean_metric("nll_quantized", "NLL, quantized", quantized),
        mean_metric("nll_delta", "change of NLL", delta, DIFFERENCE),
        Metric("nll_change", "relative change of NLL", change, change_interval, CHANGE),
    ]
    experts = [layer.experts for layer in comparison.layers if layer.experts is not None]
    keys = [layer.indexer for layer in comparison.layers if layer.indexer is not None]
    if experts:
        mean = torch.stack(experts).mean(0)
        rows.append(mean_metric("expert_agreement", "same routed experts", mean, SHARE))
    if keys:
        mean = torch.stack(keys).mean(0)
        rows.append(mean_metric("indexer_overlap", "same keys of the indexer", mean, SHARE))
    if comparison.drafts_reference is not None and comparison.drafts_quantized is not None:
        accepted = comparison.drafts_reference.double(), comparison.drafts_quantized.double()
        before, after = (1 + drafts.mean(1) for drafts in accepted)
        change, change_interval = float(after.mean() / before.mean() - 1), mean_interval(after - before, before)
        rows += [
            mean_metric("draft_source", "drafts accepted, reference (greedy)", accepted[0], SHARE),
            mean_metric("draft_quantized", "drafts accepted, quantized (greedy)", accepted[1], SHARE),
            Metric("draft_step_change", "tokens per step with one draft", change, change_interval, CHANGE),
        ]
    return rows
