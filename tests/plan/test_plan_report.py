"""The HTML report in a real browser: Debian's chromium, driven by playwright."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from glm5_ascend.cli import run
from glm5_ascend.plan import plan
from glm5_ascend.plan.report import document
from glm5_ascend.report.header import make_header
from tests.support.report_page import ReadPage, assert_self_contained, hovered, needs_chromium, shown

ARGUMENTS = ["plan", "--model", "glm-5.1", "--quant", "w8a8c8", "--nodes", "4", "--slo", "tpot=50ms",
             "--workload", "in=3500,out=1500,concurrency=480"]  # fmt: skip


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "plan.html"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", "1000000000")
        assert run([*ARGUMENTS, "--html", str(path)]) == 0
    return path


def test_it_needs_no_network_and_runs_no_other_script(report: Path) -> None:
    assert_self_contained(report)


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1200])
def test_it_shows_the_key_figures(report: Path, scheme: str, width: int, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert run([*ARGUMENTS, "--json"]) == 0
    report_json = json.loads(capsys.readouterr().out)
    with shown(report, scheme, width) as page:
        text = page.inner_text("body")
        for key in ("output_tokens_per_s", "max_context_tokens"):
            assert f"{report_json[key]['value']:,.0f}"[:5] in text, key
        assert f"TPOT: {report_json['tpot_ms']['value']:.1f} (" in text
        assert "Run it" in text and "left for the cache" in text
        assert page.locator(".chart svg").count() == 1
        assert "ms" in hovered(page, "A decode step", "rect")
        assert "SLO met" in text and "480 at a time" in text
        if width == 360:
            assert page.locator(".hint:visible").count() == 2  # both tables


@pytest.mark.parametrize(
    ("slo", "grade", "text"),
    [
        ("tpot=500ms,ttft=900s", "good", "SLO met, also at the slow end"),
        ("tpot=52ms", "fair", "SLO met by the prediction, not at the slow end"),
        ("tpot=1ms", "poor", "SLO not met"),
        (None, "open", "No SLO was given"),
    ],
)
def test_the_verdict(slo: str | None, grade: str, text: str) -> None:
    result = plan(model="glm-5.1", quant="w8a8c8", nodes=4, slo=slo, workload="in=3500,out=1500,concurrency=480")
    judged = document(result, make_header()).verdict
    assert judged.grade == grade and text in judged.text
    assert ("--slo" in judged.reason) == (slo is not None)


def test_it_says_where_it_comes_from(report: Path) -> None:
    text = ReadPage(report.read_text(encoding="utf-8")).text
    assert shlex.join(["glm5-ascend", *ARGUMENTS, "--html", str(report)]) in text
    assert "2001-09-09 01:46:40 UTC" in text and "GB of memory" in text
