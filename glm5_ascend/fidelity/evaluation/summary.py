"""A finished evaluation as text and JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from glm5_ascend.fidelity.evaluation.compare import LayerAgreement
from glm5_ascend.fidelity.evaluation.judging import GRADES, Judged, judged, worst
from glm5_ascend.fidelity.evaluation.metrics import Metric
from glm5_ascend.report.verdict import FEW_WINDOWS, KL_CLOSE, ReportVerdict

_WORTH = {
    "good": "Close to the reference",
    "fair": "Usable, test it on your tasks",
    "poor": "Far from the reference",
}
#: Figures of a task or a length that are printed; --json has all.
SHOWN_BY_TASK = (
    "kl_mean", "flip_rate", "nll_delta", "indexer_overlap", "needles_source", "needles_kept", "length_inflation",
    "score_change", "answer_flips", "tool_calls_kept", "draft_step_change",
)  # fmt: skip


@dataclass
class Summary:
    """What is reported: the figures, the windows they come from, and the agreement of every layer."""

    this: str
    reference: str
    rows: list[Metric] = field(default_factory=list)
    generated: list[Metric] = field(default_factory=list)
    layers: list[LayerAgreement] = field(default_factory=list)
    window: int = 0
    windows: int = 0
    prompts: int = 0
    kl_is_bound: bool = False
    per_window: torch.Tensor | None = None  # mean KL [windows]
    tasks: dict[str, list[Metric]] = field(default_factory=dict)  # of each family of tasks, and of each length

    @property
    def tokens(self) -> int:
        """Positions with a prediction."""
        return self.windows * max(0, self.window - 1)

    def judged(self) -> list[Judged]:
        """All graded figures: of everything, then of each task and each length."""
        parts = [("", [*self.rows, *self.generated]), *self.tasks.items()]
        return [each for task, rows in parts for each in judged(rows, task)]

    def verdict(self) -> ReportVerdict:
        """The worst grade, and what got it."""
        found, warnings = self.judged(), tuple(self._warnings())
        if not found:
            return ReportVerdict("open", "No verdict: KL was not measured.", "", "", warnings)
        first, *others = worst(found)
        more = f", and {len(others)} more" if others and first.grade != "good" else ""
        text = f"{_WORTH[first.grade]}: {worded(first)}{more}."
        reason = first.criterion.reason
        if first.criterion.metric == "kl_mean" and first.grade == "good":
            reason = KL_CLOSE.reason
        return ReportVerdict(first.grade, text, _threshold(first), reason, warnings)

    def _warnings(self) -> Iterator[str]:
        for what, count in (("windows", self.windows if self.rows else 0), ("prompts", self.prompts)):
            if 0 < count < FEW_WINDOWS.value:
                least = f"{FEW_WINDOWS.value:.0f}"
                yield f"{count} {what}: too few for a 95 % interval (at least {least}): {FEW_WINDOWS.reason}"
        if self.kl_is_bound and any(row.name == "kl_mean" for row in self.rows):
            yield "KL from a server's most probable tokens is a lower bound: the true one may be larger."
        if open_ := [each for each in self.judged() if not each.settled and not each.criterion.far]:
            named = ", ".join(dict.fromkeys(f"{each.criterion.what}{_of(each)}" for each in open_))
            yield f"not settled: {named} (the interval passes a limit; more windows or prompts would tell)"

    def lines(self) -> Iterator[str]:
        yield f"{self.this} against {self.reference}"
        if self.rows:
            yield f"{self.tokens} positions in {self.windows} windows of {self.window} tokens"
        for row in self.rows:
            yield _line(row)
        if self.generated:
            yield f"{self.prompts} prompts"
        for row in self.generated:
            yield _line(row)
        for task, rows in self.tasks.items():
            yield f"{task}:"
            for row in rows:
                if row.name in SHOWN_BY_TASK:
                    yield _line(row)
        graded = self.judged()
        if len(graded) > 1:
            yield "grades: " + "; ".join(_by_grade(graded))
        found = self.verdict()
        yield f"{found.text}{f' (threshold: {found.threshold})' if found.threshold else ''}"
        if self.windows == 1 or self.prompts == 1:
            yield "note: no intervals from a single window or prompt"
            return
        for warning in found.warnings:
            yield "note: " + warning.partition(" (")[0]  # the reasons stand in the HTML report

    def to_dict(self) -> dict[str, Any]:
        value: dict[str, Any] = {
            "schema_version": 1, "command": "eval", "ok": True, "exit_code": 0, "this": self.this,
            "reference": self.reference, "tokens": self.tokens, "windows": self.windows, "window": self.window,
            "prompts": self.prompts,
        }  # fmt: skip
        rows = [*self.rows, *self.generated]
        value |= {row.name: row.value for row in rows}
        value["intervals"] = {row.name: row.interval for row in rows if row.interval is not None}
        value["verdict"] = asdict(self.verdict())
        value["judged"] = [
            {"figure": each.metric.name, "task": each.task, "value": each.metric.value, "grade": each.grade,
             "settled": each.settled, "close": each.criterion.close, "usable": each.criterion.usable}
            for each in self.judged()
        ]  # fmt: skip
        value["tasks"] = {task: {row.name: row.value for row in rows} for task, rows in self.tasks.items()}
        value["kl_is_lower_bound"] = self.kl_is_bound
        value["layers"] = [
            {
                "layer": layer.layer,
                "expert_agreement": mean_share(layer.experts),
                "indexer_overlap": mean_share(layer.indexer),
            }
            for layer in self.layers
        ]
        return value


def _by_grade(graded: list[Judged]) -> Iterator[str]:
    """What is good is counted, the rest named."""
    good = sum(each.grade == "good" for each in graded)
    if good:
        yield f"{good} of {len(graded)} good"
    for grade in GRADES[1:]:
        if named := [f"{each.criterion.what}{_of(each)}" for each in graded if each.grade == grade]:
            yield f"{grade}: {', '.join(named)}"


def worded(found: Judged) -> str:
    """A judged figure in words, with the end of its interval that was judged."""
    row, unit = found.metric, " nats" if found.metric.name in ("kl_mean", "nll_delta") else ""
    if row.interval is None:
        end = "one window" if found.criterion.far else "no interval"
    else:
        upper = (found.criterion.sign > 0) == found.criterion.far
        side = "upper" if upper else "lower"
        end = f"{side} end of its 95 % interval: {value_text(row, row.interval[upper])}"
    return f"{found.criterion.what}{_of(found)} {value_text(row, row.value)}{unit} ({end})"


def _of(found: Judged) -> str:
    return f" of {found.task}" if found.task else ""


def limit_text(found: Judged, limit: float) -> str:
    """A limit of a judged figure, with its unit."""
    return f"{limit:g} nats" if found.metric.name in ("kl_mean", "nll_delta") else f"{limit:.0%}"


def _threshold(found: Judged) -> str:
    unit = " nats" if found.metric.name in ("kl_mean", "nll_delta") else ""
    close, usable = (
        f"{limit:g}" if unit else f"{limit:.0%}" for limit in (found.criterion.close, found.criterion.usable)
    )
    above, most = ("above", "at most") if found.criterion.sign > 0 else ("below", "at least")
    if found.grade == "good":
        return f"{most} {close}{unit}"
    return f"{above} {usable}{unit}" if found.grade == "poor" else f"{above} {close}, {most} {usable}{unit}"


def mean_share(share: torch.Tensor | None) -> float | None:
    """Mean over windows of a share [windows]; None where there is nothing to compare."""
    return None if share is None else float(share.mean())


def value_text(row: Metric, value: float) -> str:
    """`value` as figures of the kind of `row` are written."""
    signed = row.name.endswith(("change", "delta", "inflation"))
    if row.percent:
        return f"{value:+.2%}" if signed else f"{value:.2%}"
    if row.name.startswith("length"):
        return f"{value:.1f}"
    return f"{value:+.6f}" if signed else f"{value:.6f}"


def span(row: Metric) -> str:
    """The 95 % interval, or nothing."""
    return "" if row.interval is None else f"[{value_text(row, row.interval[0])}, {value_text(row, row.interval[1])}]"


def _line(row: Metric) -> str:
    return f"  {row.label:<52} {value_text(row, row.value):>12}  {span(row)}".rstrip()
