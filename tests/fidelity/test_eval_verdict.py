"""What an evaluation's report says it is worth."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

from glm5_ascend.fidelity.evaluation.compare import LayerAgreement
from glm5_ascend.fidelity.evaluation.html import document, header_of
from glm5_ascend.fidelity.evaluation.judging import CRITERIA
from glm5_ascend.fidelity.evaluation.metrics import Metric
from glm5_ascend.fidelity.evaluation.summary import Summary
from glm5_ascend.report.header import COMMAND, ReportHeader

HEADER = ReportHeader(datetime(2026, 1, 2, tzinfo=UTC), "glm5-ascend eval", (("glm5-ascend", "1"),), "a machine")


def summary(kl: float, high: float | None, windows: int = 64) -> Summary:
    interval = None if high is None else (kl / 2, high)
    rows = [Metric("kl_mean", "KL to the reference, mean", kl, interval, group="kl")]
    return Summary("this", "reference", rows, window=8, windows=windows)


@pytest.mark.parametrize(
    ("kl", "high", "grade"),
    [(0.005, 0.01, "good"), (0.005, 0.011, "fair"), (0.02, 0.03, "fair"), (0.02, 0.031, "poor"), (0.009, None, "good")],
)
def test_the_upper_end_decides(kl: float, high: float | None, grade: str) -> None:
    found = summary(kl, high).verdict()
    assert found.grade == grade and "nats" in found.threshold and "llama.cpp" in found.reason and not found.warnings


NEAR = {  # figure: limits, and intervals whose near end is good, fair and poor
    "nll_delta": ((-0.01, 0.02), (0.006, 0.02), (0.02, 0.03)),
    "flip_rate": ((0.02, 0.06), (0.03, 0.06), (0.051, 0.06)),
    "length_inflation": ((-0.1, 0.3), (0.06, 0.3), (0.21, 0.3)),
    "score_change": ((-0.1, -0.01), (-0.1, -0.03), (-0.1, -0.06)),
    "tool_calls_kept": ((0.8, 0.99), (0.8, 0.96), (0.8, 0.94)),
    "draft_step_change": ((-0.1, 0.0), (-0.1, -0.02), (-0.1, -0.06)),
}


@pytest.mark.parametrize("name", sorted(NEAR))
def test_of_the_other_figures_the_near_end_decides(name: str) -> None:
    for ends, grade in zip(NEAR[name], ("good", "fair", "poor"), strict=True):
        found = summary(0.005, 0.006)
        found.rows.append(Metric(name, name, sum(ends) / 2, ends, True))
        judged = next(each for each in found.judged() if each.criterion.metric == name)
        assert (judged.grade, judged.settled) == (grade, grade == "poor")
        verdict = found.verdict()
        assert verdict.grade == grade and (judged.criterion.what in verdict.text) == (grade != "good")
        assert any("not settled" in warning for warning in verdict.warnings) == (grade != "poor")
        if grade == "fair":
            assert verdict.threshold.startswith(("above", "below")) and verdict.reason == judged.criterion.reason


def test_the_worst_task_decides_and_is_named() -> None:
    found = summary(0.005, 0.006)
    found.tasks = {
        "code": [Metric("kl_mean", "KL", 0.006, (0.005, 0.007))],
        "tools": [
            Metric("tool_calls_kept", "kept", 0.9, (0.85, 0.93), True),
            Metric("kl_mean", "KL", 0.02, (0.01, 0.025)),
        ],
    }
    verdict = found.verdict()
    assert verdict.grade == "poor"
    assert (
        verdict.text
        == "Far from the reference: tool calls kept of tools 90.00% (upper end of its 95 % interval: 93.00%)."
    )
    assert verdict.threshold == "below 95%" and "20 calls" in verdict.reason
    graded = {(each["task"], each["figure"]): each["grade"] for each in found.to_dict()["judged"]}
    assert graded[("code", "kl_mean")] == "good" and graded[("tools", "kl_mean")] == "fair"
    lines = list(found.lines())
    found.tasks.pop("tools")
    assert found.verdict().text.endswith("0.006000).") and found.verdict().grade == "good"
    assert "code:" in lines and "grades: 2 of 4 good; fair: mean KL of tools; poor: tool calls kept of tools" in lines


def test_every_criterion_has_its_limits_in_order_and_a_reason() -> None:
    for each in CRITERIA:
        assert each.grade(each.close) == "good" and each.grade(each.usable) == "fair"
        assert each.sign * each.close < each.sign * each.usable and len(each.reason) > 40


@pytest.mark.parametrize(("windows", "warned"), [(2, True), (19, True), (20, False)])
def test_few_windows_are_warned_of(windows: int, warned: bool) -> None:
    found = summary(0.005, 0.006, windows)
    assert any(f"{windows} windows: too few" in warning for warning in found.verdict().warnings) == warned
    assert any("too few" in line for line in found.lines()) == warned


def test_nothing_to_judge() -> None:
    assert Summary("this", "reference", prompts=3).verdict().grade == "open"
    assert "3 prompts: too few" in Summary("this", "reference", prompts=3).verdict().warnings[0]


def test_a_lower_bound_is_said() -> None:
    found = summary(0.001, 0.002)
    found.kl_is_bound = True
    assert any("lower bound" in warning for warning in found.verdict().warnings)


def test_what_differs_is_plotted_under_its_own_name() -> None:
    found = summary(0.005, 0.006)
    found.rows.append(Metric("top1_agreement", "same top-1", 0.75, (0.7, 0.875), True, "top1"))
    found.layers = [LayerAgreement(3, experts=torch.tensor([0.5, 1.0]))]
    sections = {section.title: section for section in document(found, HEADER).sections}
    (chart,) = sections["Differences and changes"].blocks
    assert chart.data.rows == [["different top-1", "0.25", "0.125", "0.30000000000000004"]]  # type: ignore[union-attr]
    (chart,) = sections["Different routed experts by layer"].blocks
    assert chart.data.rows == [["layer 3", "0.25"]]  # type: ignore[union-attr]
    assert ["same top-1", "75.00%", "[70.00%, 87.50%]"] in [list(row) for row in sections["All figures"].blocks[0].rows]  # type: ignore[union-attr]


def test_the_page_has_every_grade_with_its_reason() -> None:
    found = summary(0.005, 0.006)
    found.tasks = {"tools": [Metric("tool_calls_kept", "kept", 0.96, (0.9, 0.99), True)]}
    sections = {section.title: section for section in document(found, HEADER).sections}
    rows = [list(row) for row in sections["Grades"].blocks[0].rows]  # type: ignore[union-attr]
    assert [row[:6] for row in rows] == [
        ["mean KL", "all", "0.005000 [0.002500, 0.006000]", "good", "0.01 nats", "0.03 nats"],
        ["tool calls kept", "tools", "96.00% [90.00%, 99.00%]", "good, not settled", "99%", "95%"],
    ]
    assert "llama.cpp" in rows[0][6] and "20 calls" in rows[1][6] and "All figures: tools" in sections


def test_no_secret_in_title_or_command() -> None:
    token = COMMAND.set(("eval", "--url", "http://me:pw@host:1", "--key", "pw"))
    try:
        page = document(Summary("http://me:pw@host:1", "src"), header_of(None, None, ()))
    finally:
        COMMAND.reset(token)
    assert "pw" not in page.title + page.header.command and page.header.text == ""


@pytest.mark.parametrize("content", ["{", "[]", '{"recipe": 3}', '{"seed": 1}'])
def test_a_strange_provenance_is_no_error(content: str, tmp_path: Path) -> None:
    (tmp_path / "glm5_ascend_provenance.json").write_text(content)
    assert header_of(tmp_path, None, ["text"]).recipe == ""
