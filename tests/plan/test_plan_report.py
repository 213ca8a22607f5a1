"""The HTML report in a real browser: Debian's chromium, driven by playwright."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from glm5_ascend.cli import run
from tests.support.report_page import assert_self_contained, needs_chromium, shown

ARGUMENTS = ["plan", "--model", "glm-5.1", "--quant", "w8a8c8", "--nodes", "4", "--slo", "tpot=50ms",
             "--workload", "in=3500,out=1500,concurrency=480", "--price", "80"]  # fmt: skip


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "plan.html"
    assert run([*ARGUMENTS, "--html", str(path)]) == 0
    return path


def test_it_needs_no_network_and_no_script(report: Path) -> None:
    assert_self_contained(report)


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1200])
def test_it_shows_the_key_figures(report: Path, scheme: str, width: int, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert run([*ARGUMENTS, "--json"]) == 0
    wanted = json.loads(capsys.readouterr().out)
    with shown(report, scheme, width) as page:
        text = page.inner_text("body")
        for key in ("output_tokens_per_s", "max_context_tokens"):
            assert f"{wanted[key]['value']:,.0f}"[:5] in page.inner_text(f"#{key}")
        assert f"{wanted['tpot_ms']['value']:.1f} ms" in page.inner_text("#tpot_ms")
        assert "per million output tokens" in text and "Run it" in text
        assert page.locator("svg").count() == 3
        assert page.locator("svg[aria-label='throughput over latency'] circle[r='6']").count() == 1
