"""Grades of an evaluation's figures: every criterion with its two limits and their reasons.

Up to `good` a figure is good, up to `fair` it is fair, above it is poor. Judged is one end of the 95 % interval. For KL
it is the worse end, because text for more windows is easy to get. For all other figures it is the better end: noise
alone does not lower a grade. If the interval crosses a limit, the grade is inconclusive: more windows would decide.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from glm5_ascend.fidelity.evaluation.metrics import Metric
from glm5_ascend.report.page import Grade

GRADES: tuple[Grade, ...] = ("good", "fair", "poor")
_LLAMA = (
    "Mean KL to FP16 that llama.cpp publishes for LLaMA 3 8B (tools/perplexity/README.md, Wikitext-2): 8 bits 0.0014, "
    "6 bits 0.0055, 5 bits 0.011, 4 bits (q4_K_M) 0.031, 2 bits 0.45 nats. Up to 0.01 is what 5 or more bits cost "
    "there, up to 0.03 its most used 4-bit type; above, test your tasks first."
)
_NATS = ("kl_mean", "nll_delta")
_RUNS = "GLM-5.2's GPQA score varies by 2 to 3 points from run to run (vllm-ascend #14378)"


@dataclass(frozen=True)
class Criterion:
    """Limits of one metric.

    Attributes:
        metric: its name. label: its name for the reader.
        good, fair: the limits.
        sign: 1 where large values are bad, -1 where small ones are.
        worse_end: whether the worse end of the interval is judged.
    """

    metric: str
    label: str
    good: float
    fair: float
    reason: str
    sign: int = 1
    worse_end: bool = False

    def grade(self, value: float) -> Grade:
        return GRADES[sum(self.sign * value > self.sign * limit for limit in (self.good, self.fair))]

    def limit_text(self, limit: float) -> str:
        return f"{limit:g} nats" if self.metric in _NATS else f"{limit:.0%}"


CRITERIA = (
    Criterion("kl_mean", "mean KL", 0.01, 0.03, _LLAMA, worse_end=True),
    Criterion(
        "nll_delta", "NLL", 0.005, 0.016,
        "Perplexity that llama.cpp published for Llama 2 70B: 6 bits +0.16 %, 5 bits +0.40 to +0.50 %, 4 bits +1.2 to "
        "+1.6 %, 3 bits +3.8 to +7.9 %. A nat of NLL is the logarithm of that ratio.",
    ),
    Criterion(
        "flip_rate", "flips", 0.02, 0.05,
        f"No score can change by more than the share of flips. {_RUNS}: up to 2 % cannot be seen in it. "
        "5 % is half of what vllm-ascend's CI allows AIME2025 to miss.",
    ),
    Criterion(
        "draft_step_change", "tokens per step with MTP", -0.01, -0.05,
        "Decoding slows down by as much: a step gives 1 + accepted drafts. A healthy log of vllm-ascend #9803 has 0.89 "
        "of first drafts accepted: 1 % are 2 of 100 drafts.", sign=-1,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class GradedMetric:
    """One figure and its grade.

    Attributes:
        task: the task it belongs to, "" for all text.
        inconclusive: whether the interval crosses a limit.
    """

    criterion: Criterion
    metric: Metric
    task: str
    grade: Grade
    inconclusive: bool

    @property
    def name(self) -> str:
        return self.criterion.label + (f" of {self.task}" if self.task else "")

    @property
    def text(self) -> str:
        """The figure in words, with the end of its interval that was judged."""
        criterion, metric = self.criterion, self.metric
        if metric.interval is None:
            end = "one window" if criterion.worse_end else "no interval"
        else:
            upper = (criterion.sign > 0) == criterion.worse_end
            value = format(metric.interval[upper], metric.format)
            end = f"{'upper' if upper else 'lower'} end of its 95 % interval: {value}"
        return f"{self.name} {metric.text}{' nats' if metric.name in _NATS else ''} ({end})"

    @property
    def threshold(self) -> str:
        good, fair = (self.criterion.limit_text(limit) for limit in (self.criterion.good, self.criterion.fair))
        return f"good up to {good}, fair up to {fair}"


def grade_metrics(rows: Iterable[Metric], task: str = "") -> list[GradedMetric]:
    """Grades of the figures that have a criterion, in the order of the criteria."""
    by_name = {row.name: row for row in rows}
    return [_grade(criterion, by_name[criterion.metric], task) for criterion in CRITERIA if criterion.metric in by_name]


def _grade(criterion: Criterion, metric: Metric, task: str) -> GradedMetric:
    ends = sorted(metric.interval or (metric.value, metric.value), key=lambda end: criterion.sign * end)
    better, worse = map(criterion.grade, ends)
    inconclusive = better != worse and not criterion.worse_end
    return GradedMetric(criterion, metric, task, worse if criterion.worse_end else better, inconclusive)
