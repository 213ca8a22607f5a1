"""A finished evaluation as one HTML page, and what it is worth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from glm5_ascend.checkpoint.output import PROVENANCE_NAME
from glm5_ascend.errors import CheckpointError
from glm5_ascend.fidelity.evaluation.metrics import Metric
from glm5_ascend.fidelity.evaluation.summary import Summary, limit_text, mean_share, span, value_text
from glm5_ascend.files.untrusted import read_json_object
from glm5_ascend.report import charts
from glm5_ascend.report.content import Card, Page, Section, Table
from glm5_ascend.report.header import Hashed, ReportHeader, hashed_file, hashed_text, make_header, without_login

_NOTE = (
    "Teacher-forced. Intervals: 95 %, paired bootstrap over windows (prompts for generation). Flips: positions where "
    "just one of the two models has the true token as its most probable one."
)
_JUDGED = (
    "The verdict is the worst grade. Judged is the far end of the interval for KL, for all others the near one: noise "
    "alone counts against nobody. Not settled: the far end lies beyond the limit."
)
_CARDS = ("kl_mean", "kl_p99", "top1_agreement", "nll_change", "length_inflation", "score_change")
#: What agrees, and what is plotted of it: its difference to 100 %.
_DIFFERENCE = {
    "top1_agreement": "different top-1",
    "expert_agreement": "different routed experts",
    "indexer_overlap": "different keys of the indexer",
}
_NATS = ("kl_mean", "kl_p99", "nll_delta")
_SHARES = ("flip_rate", "nll_change", "length_inflation", "score_change")


def document(found: Summary, header: ReportHeader) -> Page:
    """The report; `header` says where it comes from."""
    rows = [*found.rows, *found.generated]
    intro = []
    if found.rows:
        intro.append(f"{found.tokens:,} positions in {found.windows} windows of {found.window} tokens. {_NOTE}")
    if found.generated:
        intro.append(f"{found.prompts} prompts, answered by both servers.")
    return Page(
        f"{without_login(found.this)} against {without_login(found.reference)}",
        header,
        found.verdict(),
        intro,
        [Card(row.name, value_text(row, row.value), row.label, span(row)) for row in rows if row.name in _CARDS],
        list(_sections(found, rows)),
    )


def header_of(directory: Path | None, text: Path | None, default: Sequence[str]) -> ReportHeader:
    """Where an evaluation comes from: seed and recipe as the quantized checkpoint states them, and the text.

    Args:
        directory: quantized checkpoint; None: a server's. text: None: the texts `default`.
    """
    known: dict[str, Any] = {}
    if directory is not None and (path := directory / PROVENANCE_NAME).is_file():
        try:
            known = read_json_object(path)
        except CheckpointError:  # of another tool, or damaged: the figures do not depend on it
            known = {}
    made = known.get("recipe") if isinstance(known, dict) else None
    recipe = str(Hashed(str(made.get("name")), str(made.get("sha256")))) if isinstance(made, dict) else ""
    seed = f"{known['seed']} (of the quantization; the bootstrap's is 0)" if recipe and "seed" in known else ""
    used = hashed_file(text) if text is not None else hashed_text("Python's documentation", "\n\n".join(default))
    return make_header(seed or "0 (of the bootstrap)", recipe, str(used) if text is not None or default else "")


def _sections(found: Summary, rows: list[Metric]) -> Iterator[Section]:
    nats = [_interval(row) for row in rows if row.name in _NATS]
    if nats:
        yield Section("Figures in nats", [charts.intervals("Figures in nats", nats, "nats")])
    shares = [_interval(row) for row in rows if row.name in _DIFFERENCE or row.name in _SHARES]
    if shares:
        yield Section(
            "Differences and changes",
            [charts.intervals("Differences and changes", shares, "share", percent=True)],
            "Where two models agree, what differs is plotted: 100 % less the agreement.",
        )
    if found.per_window is not None:
        drawn = charts.columns("Mean KL of each window", found.per_window.tolist(), "window", "mean KL in nats")
        yield Section("Mean KL of each window", [drawn])
    for title, values in (
        ("Different routed experts by layer", [(layer.layer, mean_share(layer.experts)) for layer in found.layers]),
        (
            "Different keys of the indexer by layer",
            [(layer.layer, mean_share(layer.indexer)) for layer in found.layers],
        ),
    ):
        known = [(f"layer {number}", 1 - share, f"{1 - share:.2%}") for number, share in values if share is not None]
        if known:
            yield Section(title, [charts.bars(title, known, "share that differs", percent=True)])
    yield from _grades(found)
    yield _table("All figures", rows)
    for task, those in found.tasks.items():
        yield _table(f"All figures: {task}", those)


def _grades(found: Summary) -> Iterator[Section]:
    """Every judged figure with its limits and their reason."""
    table = [
        (
            each.criterion.what,
            each.task or "all",
            f"{value_text(each.metric, each.metric.value)} {span(each.metric)}",
            each.grade + ("" if each.settled or each.criterion.far else ", not settled"),
            limit_text(each, each.criterion.close), limit_text(each, each.criterion.usable), each.criterion.reason,
        )
        for each in found.judged()
    ]  # fmt: skip
    if table:
        columns = ["figure", "task", "value", "grade", "good up to", "fair up to", "why"]
        yield Section("Grades", [Table(columns, table)], _JUDGED)


def _table(title: str, rows: Sequence[Metric]) -> Section:
    table = [(row.label, value_text(row, row.value), span(row)) for row in rows]
    return Section(title, [Table(["figure", "value", "95 % interval"], table)])


def _interval(row: Metric) -> charts.Interval:
    if row.name not in _DIFFERENCE:
        return charts.Interval(row.label, row.value, row.interval, value_text(row, row.value))
    ends = None if row.interval is None else (1 - row.interval[1], 1 - row.interval[0])
    return charts.Interval(_DIFFERENCE[row.name], 1 - row.value, ends, f"{1 - row.value:.2%}")
