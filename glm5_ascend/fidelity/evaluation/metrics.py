"""Per-position values -> the figures that are reported.

Flips as in "Accuracy is Not All You Need" (Dutta et al., arXiv 2407.09141): answers that change from right to wrong
or from wrong to right. Teacher-forced, an answer is the most probable next token, and the true one is right. Top-1
agreement also counts one wrong token exchanged for another: 1 - top-1 agreement is never below the flip rate.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from glm5_ascend.fidelity.evaluation.compare import FidelityComparison
from glm5_ascend.fidelity.evaluation.drafts import DraftComparison
from glm5_ascend.fidelity.evaluation.intervals import Interval, mean_interval

#: Formats of figures.
SHARE, CHANGE, DIFFERENCE = ".2%", "+.2%", "+.6f"


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
    return rows + (_draft_metrics(comparison.drafts) if comparison.drafts is not None else [])


def _draft_metrics(drafts: DraftComparison) -> list[Metric]:
    reference, quantized = drafts.reference.double(), drafts.quantized.double()
    before, after = 1 + reference.mean(1), 1 + quantized.mean(1)
    change = float(after.mean() / before.mean() - 1)
    return [
        mean_metric("draft_source", "drafts accepted, reference (greedy)", reference, SHARE),
        mean_metric("draft_quantized", "drafts accepted, quantized (greedy)", quantized, SHARE),
        Metric(
            "draft_step_change", "tokens per step with one draft", change, mean_interval(after - before, before), CHANGE
        ),
    ]
