"""What the figures of an evaluation are worth: each criterion with its two limits, and why they stand where they do.

Up to `close` a figure is good, up to `usable` fair, beyond poor. Judged is an end of its 95 % interval: for KL the far
one, because enough windows can be had; for all others the near one, so that noise alone never counts against a
checkpoint. Where the far end lies beyond the limit, the grade is not settled: more windows or prompts would tell.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from glm5_ascend.fidelity.evaluation.metrics import Metric
from glm5_ascend.report.verdict import KL_CLOSE, KL_USABLE, Grade

GRADES: tuple[Grade, ...] = ("good", "fair", "poor")
_RUNS = "GLM-5.2's GPQA score varies by 2 to 3 points from run to run (vllm-ascend #14378)"


@dataclass(frozen=True)
class Criterion:
    """metric: its name. sign: 1 where large values are bad, -1 where small ones are. far: which end is judged."""

    metric: str
    what: str
    close: float
    usable: float
    reason: str
    sign: int = 1
    far: bool = False

    def grade(self, value: float) -> Grade:
        """Of a single value."""
        return GRADES[sum(self.sign * value > self.sign * limit for limit in (self.close, self.usable))]


CRITERIA = (
    Criterion("kl_mean", "mean KL", KL_CLOSE.value, KL_USABLE.value, KL_USABLE.reason, far=True),
    Criterion(
        "nll_delta", "loss (NLL)", 0.005, 0.016,
        "Perplexity that llama.cpp published for Llama 2 70B: 6 bits +0.16 %, 5 bits +0.40 to +0.50 %, 4 bits +1.2 to "
        "+1.6 %, 3 bits +3.8 to +7.9 %. A nat of NLL is the logarithm of that ratio.",
    ),
    Criterion(
        "flip_rate", "flips", 0.02, 0.05,
        f"No score can change by more than the share of flips. {_RUNS}: up to 2 % cannot be seen in it. "
        "5 % is half of what vllm-ascend's CI allows AIME2025 to miss.",
    ),
    Criterion(
        "answer_flips", "flipped answers", 0.02, 0.05,
        f"As flips, of whole answers. {_RUNS}.",
    ),
    Criterion("score_change", "right answers", -0.02, -0.05, f"{_RUNS}; vllm-ascend's CI allows 5 to 10.", sign=-1),
    Criterion(
        "length_inflation", "length of answers", 0.05, 0.2,
        "Time and money per answer grow with it. Published for GLM-5.2 and 5.3: AWQ 5 to 18 % more tokens than GPTQ "
        "(W4AFP8), and 56 to 63 % longer reasoning with MXFP4.",
    ),
    Criterion(
        "tool_calls_kept", "tool calls kept", 0.99, 0.95,
        "A session of 20 calls goes the same way in 0.99^20 = 82 % of cases, or 0.95^20 = 36 %.", sign=-1,
    ),
    Criterion(
        "draft_step_change", "tokens per step with MTP", -0.01, -0.05,
        "Decoding slows down by as much: a step gives 1 + accepted drafts. A healthy log of vllm-ascend #9803 has 0.89 "
        "of first drafts accepted: 1 % are 2 of 100 drafts.", sign=-1,
    ),
    Criterion(
        "needles_kept", "keys that a repeated passage needs", 0.99, 0.95,
        "A key that is not chosen cannot be attended to: its fact is lost to the answer.", sign=-1,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Judged:
    """One figure and its grade. task: of one family of tasks, "" for all. settled: the far end has the same grade."""

    criterion: Criterion
    metric: Metric
    task: str
    grade: Grade
    settled: bool

    @property
    def limit(self) -> float:
        """The limit of its grade; where it is poor, the one it passed."""
        return self.criterion.close if self.grade == "good" else self.criterion.usable


def judged(rows: Iterable[Metric], task: str = "") -> list[Judged]:
    """Grades of those figures that there are criteria for, in the order of the criteria."""
    named = {row.name: row for row in rows}
    return [_judged(each, named[each.metric], task) for each in CRITERIA if each.metric in named]


def _judged(criterion: Criterion, metric: Metric, task: str) -> Judged:
    near, far = sorted(metric.interval or (metric.value, metric.value), key=lambda end: criterion.sign * end)
    grades = criterion.grade(near), criterion.grade(far)
    return Judged(criterion, metric, task, grades[criterion.far], grades[0] == grades[1])


def worst(found: Iterable[Judged]) -> list[Judged]:
    """Those of the worst grade."""
    found = list(found)
    grade = max((GRADES.index(each.grade) for each in found), default=0)
    return [each for each in found if GRADES.index(each.grade) == grade]
