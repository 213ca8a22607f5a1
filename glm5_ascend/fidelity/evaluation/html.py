"""A finished evaluation as one HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from glm5_ascend.checkpoint.output import PROVENANCE_NAME
from glm5_ascend.errors import CheckpointError
from glm5_ascend.fidelity.evaluation.metrics import Metric
from glm5_ascend.fidelity.evaluation.python_docs import documents
from glm5_ascend.fidelity.evaluation.report import EvaluationReport, mean_share
from glm5_ascend.files.untrusted import read_json_object
from glm5_ascend.report import charts
from glm5_ascend.report.content import Card, Page, Section, Table
from glm5_ascend.report.header import Hashed, ReportHeader, hashed_file, hashed_text, make_header, without_login

_NOTE = (
    "Teacher-forced. Intervals: 95 %, paired bootstrap over windows. Flips: positions where "
    "exactly one of the two models has the true token as its most probable one."
)
_GRADES_NOTE = (
    "The verdict is the worst grade. Judged is the worse end of the interval for KL and the better end for all other "
    "figures. Inconclusive: the 95 % interval crosses the limit."
)
_CARDS = ("kl_mean", "kl_p99", "top1_agreement", "nll_change")
_NATS = ("kl_mean", "nll_delta")
_SHARES = ("flip_rate", "nll_change")


def document(report: EvaluationReport, header: ReportHeader) -> Page:
    """The page of a report."""
    rows = report.rows
    intro = [f"{report.tokens:,} positions in {report.windows} windows of {report.window} tokens. {_NOTE}"]
    return Page(
        f"{without_login(report.quantized)} against {without_login(report.reference)}",
        header,
        report.verdict(),
        intro,
        [Card(row.name, row.text, row.label, row.interval_text) for row in rows if row.name in _CARDS],
        list(_sections(report, rows)),
    )


def header_of(directory: Path | None, text: Path | None) -> ReportHeader:
    """Origin of an evaluation: seed and recipe from the provenance of the quantized checkpoint, and the text.

    Args:
        directory: quantized checkpoint; None: a server's.
        text: None: Python's documentation.
    """
    provenance = {}
    if directory is not None and (path := directory / PROVENANCE_NAME).is_file():
        with suppress(CheckpointError):  # a damaged file does not change the figures
            provenance = read_json_object(path)
    entry = provenance.get("recipe")
    recipe = str(Hashed(str(entry.get("name")), str(entry.get("sha256")))) if isinstance(entry, dict) else ""
    seed = "0 (of the bootstrap)"
    if recipe and "seed" in provenance:
        seed = f"{provenance['seed']} (of the quantization; the bootstrap's is 0)"
    default = hashed_text("Python's documentation", "\n\n".join(documents(held_out=True)))
    return make_header(seed, recipe, str(default if text is None else hashed_file(text)))


def _sections(report: EvaluationReport, rows: list[Metric]) -> Iterator[Section]:
    for title, names, axis in (("Figures in nats", _NATS, "nats"), ("Flips and changes", _SHARES, "share")):
        intervals = [charts.Interval(row.label, row.value, row.interval, row.text) for row in rows if row.name in names]
        if intervals:
            yield Section(title, [charts.intervals(title, intervals, axis, percent=axis == "share")])
    if report.window_kl is not None:
        title = "Mean KL of each window"
        yield Section(title, [charts.columns(title, report.window_kl.tolist(), "window", "mean KL in nats")])
    for title, values in (
        ("Different routed experts by layer", [(layer.layer, mean_share(layer.experts)) for layer in report.layers]),
        (
            "Different keys of the indexer by layer",
            [(layer.layer, mean_share(layer.indexer)) for layer in report.layers],
        ),
    ):
        bars = [(f"layer {layer}", 1 - share, f"{1 - share:.2%}") for layer, share in values if share is not None]
        if bars:
            yield Section(title, [charts.bars(title, bars, "share that differs", percent=True)])
    yield from _grades(report)
    yield _table("All figures", rows)
    for task, task_rows in report.tasks.items():
        yield _table(f"All figures: {task}", task_rows)


def _grades(report: EvaluationReport) -> Iterator[Section]:
    table = [
        (
            graded.criterion.label,
            graded.task or "all",
            f"{graded.metric.text} {graded.metric.interval_text}",
            graded.grade + (", inconclusive" if graded.inconclusive else ""),
            graded.criterion.limit_text(graded.criterion.good),
            graded.criterion.limit_text(graded.criterion.fair),
            graded.criterion.reason,
        )
        for graded in report.grades()
    ]
    if table:
        columns = ["figure", "task", "value", "grade", "good up to", "fair up to", "reason"]
        yield Section("Grades", [Table(columns, table)], _GRADES_NOTE)


def _table(title: str, rows: Sequence[Metric]) -> Section:
    cells = [(row.label, row.text, row.interval_text) for row in rows]
    return Section(title, [Table(["figure", "value", "95 % interval"], cells)])
