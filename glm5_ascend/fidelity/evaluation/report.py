"""A finished evaluation as text, JSON and HTML page, and its verdict."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from glm5_ascend.errors import json_frame
from glm5_ascend.fidelity.evaluation.compare import LayerAgreement
from glm5_ascend.fidelity.evaluation.grades import GRADES, GradedMetric, grade_metrics
from glm5_ascend.fidelity.evaluation.metrics import Metric
from glm5_ascend.report.origin import without_login
from glm5_ascend.report.page import Page, ReportVerdict, Section

_MEANING = {
    "good": "Close to the reference",
    "fair": "Usable, test it on your tasks",
    "poor": "Far from the reference",
}
_NOTE = (
    "Teacher-forced. Intervals: 95 %, paired bootstrap over windows. Flips: positions where exactly one of the two "
    "models has the true token as its most probable one."
)
_GRADES_NOTE = (
    "The verdict is the worst grade. Judged is the worse end of the interval for KL and the better end for all other "
    "figures. Inconclusive: the 95 % interval crosses the limit."
)
#: Fewer windows than these are warned of.
_ENOUGH_WINDOWS = 20
_FEW_WINDOWS = (
    "a percentile bootstrap is too narrow for few windows: with 2, what is printed as 95 % covers 60 %; with 5, 85 %; "
    "with 10, 90 %; with 20, 93 % (exact for windows whose means are normally distributed)"
)
#: Figures of a model card.
_ON_CARD = ("kl_mean", "top1_agreement", "flip_rate", "nll_source", "nll_quantized", "draft_quantized")
#: Figures of a task that the terminal shows; --json has all.
_SHOWN_BY_TASK = ("kl_mean", "flip_rate", "nll_delta", "indexer_overlap", "draft_step_change")


@dataclass
class EvaluationReport:
    """Figures of an evaluation.

    Attributes:
        quantized: directory or URL. reference: directory.
        rows: figures of the text; `window` tokens in each of `windows` windows.
        tasks: figures of each task.
    """

    quantized: str
    reference: str
    rows: list[Metric] = field(default_factory=list)
    layers: list[LayerAgreement] = field(default_factory=list)
    window: int = 0
    windows: int = 0
    kl_is_bound: bool = False
    tasks: dict[str, list[Metric]] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return self.windows * max(0, self.window - 1)

    def card_figures(self, text: Path | None) -> tuple[list[tuple[str, str]], str]:
        """Figures for a model card, and a sentence on the text that they were measured on."""
        name = "Python's documentation" if text is None else text.name
        rows = [(row.label, f"{row.text} {row.interval_text}".strip()) for row in self.rows if row.name in _ON_CARD]
        return rows, (
            f"Against its source, {self.tokens} positions of {name} in windows of {self.window} tokens, teacher-forced "
            "on a CPU by `glm5-ascend eval`; in brackets: 95 % intervals."
        )

    def grades(self) -> list[GradedMetric]:
        """All graded figures: of the whole text, then of each task."""
        parts = [("", self.rows), *self.tasks.items()]
        return [graded for task, rows in parts for graded in grade_metrics(rows, task)]

    def verdict(self) -> ReportVerdict:
        """The worst grade, and the figure that has it."""
        graded = self.grades()
        worst = max(GRADES.index(item.grade) for item in graded)
        first, *others = (item for item in graded if item.grade == GRADES[worst])
        more = f", and {len(others)} more" if others and first.grade != "good" else ""
        text = f"{_MEANING[first.grade]}: {first.text}{more}."
        return ReportVerdict(first.grade, text, first.threshold, first.criterion.reason, tuple(self._warnings()))

    def _warnings(self) -> Iterator[str]:
        if self.windows < _ENOUGH_WINDOWS:
            yield f"{self.windows} windows: too few for a 95 % interval (at least {_ENOUGH_WINDOWS}): {_FEW_WINDOWS}"
        if self.kl_is_bound:
            yield "KL from a server's most probable tokens is a lower bound: the true one may be larger."
        if names := dict.fromkeys(graded.name for graded in self.grades() if graded.inconclusive):
            yield f"inconclusive: {', '.join(names)} (the 95 % interval crosses a limit: take more windows)"

    def lines(self) -> Iterator[str]:
        """The report for a terminal."""
        yield f"{self.quantized} against {self.reference}"
        yield f"{self.tokens} positions in {self.windows} windows of {self.window} tokens"
        yield from map(_line, self.rows)
        for task, rows in self.tasks.items():
            yield f"{task}:"
            yield from (_line(row) for row in rows if row.name in _SHOWN_BY_TASK)
        graded = self.grades()
        if len(graded) > 1:
            yield "grades: " + "; ".join(_by_grade(graded))
        verdict = self.verdict()
        yield f"{verdict.text} (threshold: {verdict.threshold})"
        if self.windows == 1:
            yield "note: no intervals from a single window"
            return
        for warning in verdict.warnings:
            yield "note: " + warning.partition(" (")[0]  # the HTML report has the reasons

    def page(self) -> Page:
        """The report as an HTML page."""
        title = f"{without_login(self.quantized)} against {without_login(self.reference)}"
        intro = f"{self.tokens:,} positions in {self.windows} windows of {self.window} tokens. {_NOTE}"
        return Page(title, self.verdict(), [intro], list(self._sections()))

    def _sections(self) -> Iterator[Section]:
        for task, rows in {"": self.rows, **self.tasks}.items():
            cells = [(row.label, row.text, row.interval_text) for row in rows]
            yield Section(f"Figures of {task}" if task else "Figures", (), ("figure", "value", "95 % interval"), cells)
        grades = [
            (item.text, item.grade + ", inconclusive" * item.inconclusive, item.threshold, item.criterion.reason)
            for item in self.grades()
        ]
        yield Section("Grades", [_GRADES_NOTE], ("figure", "grade", "limits", "reason"), grades)
        for title, shares in (
            ("Routed experts that differ", [(layer.layer, mean_share(layer.experts)) for layer in self.layers]),
            ("Keys of the indexer that differ", [(layer.layer, mean_share(layer.indexer)) for layer in self.layers]),
        ):
            differ = {layer: 1 - share for layer, share in shares if share is not None}
            if differ:
                by_layer = [(str(layer), f"{share:.2%}") for layer, share in differ.items()]
                yield Section(title, (), ("layer", "share"), by_layer, list(differ.values()))

    def to_dict(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        grades = [
            {
                "metric": graded.metric.name, "task": graded.task, "value": graded.metric.value, "grade": graded.grade,
                "inconclusive": graded.inconclusive, "good_limit": graded.criterion.good,
                "fair_limit": graded.criterion.fair,
            }
            for graded in self.grades()
        ]  # fmt: skip
        shares = [(layer.layer, mean_share(layer.experts), mean_share(layer.indexer)) for layer in self.layers]
        return json_frame("eval") | {
            "quantized": self.quantized, "reference": self.reference, "tokens": self.tokens, "windows": self.windows,
            "window": self.window, **{row.name: row.value for row in self.rows},
            "intervals": {row.name: row.interval for row in self.rows if row.interval is not None},
            "verdict": asdict(self.verdict()), "grades": grades, "kl_is_lower_bound": self.kl_is_bound,
            "tasks": {task: {row.name: row.value for row in rows} for task, rows in self.tasks.items()},
            "layers": [dict(zip(("layer", "expert_agreement", "indexer_overlap"), row, strict=True)) for row in shares],
        }  # fmt: skip


def _by_grade(graded: list[GradedMetric]) -> Iterator[str]:
    good = sum(item.grade == "good" for item in graded)
    if good:
        yield f"{good} of {len(graded)} good"
    for grade in GRADES[1:]:
        if names := [item.name for item in graded if item.grade == grade]:
            yield f"{grade}: {', '.join(names)}"


def mean_share(share: torch.Tensor | None) -> float | None:
    """Mean over windows of a share [windows]."""
    return None if share is None else float(share.mean())


def _line(row: Metric) -> str:
    return f"  {row.label:<52} {row.text:>12}  {row.interval_text}".rstrip()
