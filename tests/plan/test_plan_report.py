"""The HTML report in a real browser: Debian's chromium, driven by playwright."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from glm5_ascend.cli import run

CHROMIUM = shutil.which("chromium")
ARGUMENTS = ["plan", "--model", "glm-5.1", "--quant", "w8a8c8", "--nodes", "4", "--slo", "tpot=50ms",
             "--workload", "in=3500,out=1500,concurrency=480", "--price", "80"]  # fmt: skip


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "plan.html"
    assert run([*ARGUMENTS, "--html", str(path)]) == 0
    return path


def test_it_needs_no_network_and_no_script(report: Path) -> None:
    text = report.read_text(encoding="utf-8")
    assert "<script" not in text and "http" not in text and "@import" not in text and "url(" not in text


@pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium: apt-get install chromium")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1200])
def test_it_shows_the_key_figures(report: Path, scheme: str, width: int, capsys: pytest.CaptureFixture[str]) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install -e .[dev]")
    capsys.readouterr()
    assert run([*ARGUMENTS, "--json"]) == 0
    wanted = json.loads(capsys.readouterr().out)
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
        complaints: list[str] = []
        requested: list[str] = []
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requested.append(request.url))
        page.goto(report.as_uri())
        text = page.inner_text("body")
        for key in ("output_tokens_per_s", "max_context_tokens"):
            assert f"{wanted[key]['value']:,.0f}"[:5] in page.inner_text(f"#{key}")
        assert f"{wanted['tpot_ms']['value']:.1f} ms" in page.inner_text("#tpot_ms")
        assert "per million output tokens" in text and "Run it" in text
        assert page.locator("svg").count() == 3
        assert page.locator("svg[aria-label='throughput over latency'] circle[r='6']").count() == 1
        # Nothing sticks out on a phone, and text is readable on its background in both schemes.
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        ink, paper = page.evaluate("(s => [s.color, s.backgroundColor])(getComputedStyle(document.body))")
        bright = [sum(map(int, colour[4:-1].split(","))) for colour in (ink, paper)]
        assert (bright[0] > 600 > 150 > bright[1]) if scheme == "dark" else (bright[0] < 150 < 600 < bright[1])
        browser.close()
    assert complaints == []
    assert requested == [report.as_uri()]
