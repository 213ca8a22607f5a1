"""The HTML report of a plan."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from glm5_ascend.cli import run
from glm5_ascend.plan import plan
from glm5_ascend.plan.report import document
from tests.support.report_page import assert_self_contained

ARGUMENTS = ["plan", "--model", "glm-5.1", "--quant", "w8a8c8", "--nodes", "4", "--slo", "tpot=50ms",
             "--workload", "in=3500,out=1500,concurrency=480"]  # fmt: skip


def test_it_shows_the_key_figures_and_where_it_comes_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "plan.html"
    assert run([*ARGUMENTS, "--html", str(report), "--json"]) == 0
    report_json = json.loads(capsys.readouterr().out)
    text = assert_self_contained(report).text
    for key in ("output_tokens_per_s", "max_context_tokens"):
        assert f"{report_json[key]['value']:,.0f}"[:5] in text, key
    assert f"TPOT: {report_json['tpot_ms']['value']:.1f} (" in text
    assert "Run it" in text and "left for the cache" in text
    assert "SLO met" in text and "480 at a time" in text
    assert shlex.join(["glm5-ascend", *ARGUMENTS, "--html", str(report), "--json"]) in text and "GB of memory" in text


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
    judged = document(result).verdict
    assert judged.grade == grade and text in judged.text
    assert ("--slo" in judged.reason) == (slo is not None)
