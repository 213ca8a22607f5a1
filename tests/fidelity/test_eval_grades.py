"""Grades and verdict of an evaluation, and its page."""

from __future__ import annotations

import pytest

from glm5_ascend.fidelity.evaluation.grades import CRITERIA
from glm5_ascend.fidelity.evaluation.metrics import SHARE, Metric
from glm5_ascend.fidelity.evaluation.report import EvaluationReport


def report_of(kl: float, upper: float | None, windows: int = 64) -> EvaluationReport:
    interval = None if upper is None else (kl / 2, upper)
    return EvaluationReport("out", "source", [Metric("kl_mean", "KL", kl, interval)], window=8, windows=windows)


@pytest.mark.parametrize(
    ("kl", "upper", "grade"),
    [(0.005, 0.01, "good"), (0.005, 0.011, "fair"), (0.02, 0.03, "fair"), (0.02, 0.031, "poor"), (0.009, None, "good")],
)
def test_kl_is_graded_by_the_upper_end(kl: float, upper: float | None, grade: str) -> None:
    verdict = report_of(kl, upper).verdict()
    assert verdict.grade == grade and "nats" in verdict.threshold and not verdict.warnings


@pytest.mark.parametrize(
    ("name", "intervals"),  # the better end is good, fair and poor; of the first two the worse end is not
    [
        ("flip_rate", ((0.02, 0.06), (0.03, 0.06), (0.051, 0.06))),
        ("draft_step_change", ((-0.1, -0.01), (-0.1, -0.03), (-0.1, -0.06))),
    ],
)
def test_other_figures_are_graded_by_the_better_end(name: str, intervals: tuple[tuple[float, float], ...]) -> None:
    for ends, grade in zip(intervals, ("good", "fair", "poor"), strict=True):
        report = report_of(0.005, 0.006)
        report.rows.append(Metric(name, name, sum(ends) / 2, ends, SHARE))
        graded = next(item for item in report.grades() if item.metric.name == name)
        assert (graded.grade, graded.inconclusive, report.verdict().grade) == (grade, grade != "poor", grade)
        assert any("inconclusive" in warning for warning in report.verdict().warnings) == (grade != "poor")


def test_the_worst_task_gives_the_verdict() -> None:
    report = report_of(0.005, 0.006)
    report.tasks = {
        "code": [Metric("kl_mean", "KL", 0.006, (0.005, 0.007))],
        "tools": [
            Metric("flip_rate", "flips", 0.1, (0.06, 0.13), SHARE),
            Metric("kl_mean", "KL", 0.02, (0.01, 0.025)),
        ],
    }
    verdict = report.verdict()
    assert verdict.grade == "poor" and "flips of tools 10.00%" in verdict.text and "fair up to 5%" in verdict.threshold
    grades = {(entry["task"], entry["metric"]): entry["grade"] for entry in report.to_dict()["grades"]}
    assert grades[("code", "kl_mean")] == "good" and grades[("tools", "kl_mean")] == "fair"
    (shown,) = (section for section in report.page().sections if section.title == "Grades")
    assert shown.rows[-1][1:3] == ("poor", "good up to 2%, fair up to 5%") and "flips of tools" in shown.rows[-1][0]
    report.tasks.pop("tools")
    assert report.verdict().grade == "good"


def test_limits_are_in_order() -> None:
    for criterion in CRITERIA:
        assert criterion.grade(criterion.good) == "good" and criterion.grade(criterion.fair) == "fair"


@pytest.mark.parametrize(("windows", "warned"), [(2, True), (19, True), (20, False)])
def test_few_windows_give_a_warning(windows: int, warned: bool) -> None:
    report = report_of(0.005, 0.006, windows)
    assert any("too few" in warning for warning in report.verdict().warnings) == warned
    assert any("too few" in line for line in report.lines()) == warned


def test_a_lower_bound() -> None:
    report = report_of(0.001, 0.002)
    report.kl_is_bound = True
    assert any("lower bound" in warning for warning in report.verdict().warnings)
