"""One page from its parts: hostile names stay text, charts are specifications with their values."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from glm5_ascend.cli import run
from glm5_ascend.errors import OutputError
from glm5_ascend.report import charts
from glm5_ascend.report.content import Card, Code, Page, Section, Table
from glm5_ascend.report.header import ReportHeader
from glm5_ascend.report.page import write
from glm5_ascend.report.verdict import ReportVerdict
from tests.support.report_page import assert_self_contained, needs_chromium, shown

HOSTILE = (
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "\u2028alert(1)\u2029",
    "\"'><img src=x onerror=alert(1)>",
    "{{ 7*7 }}{% raw %}",
    "${alert(1)}",
    "datum['x']]//",
)


def page_of(name: str) -> Page:
    now, versions = datetime(2026, 1, 2, tzinfo=UTC), (("glm5-ascend", "1"),)
    header = ReportHeader(now, f"glm5-ascend {name}", versions, name, name, name, name)
    drawn = [
        charts.bars(name, [(name, 1.0, name), ("other", 0.5, "0.5")], "noise"),
        charts.intervals("intervals", [charts.Interval(name, 1.0, (0.5, 1.5), name)], "nats"),
    ]
    return Page(
        name, header, ReportVerdict("poor", name, name, name, (name,)), [name], [Card("figure", name, name, name)],
        [Section(name, [*drawn, Table([name], [[name]]), Code(name)], name, [name])],
    )  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_names_never_become_markup(name: str, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write(path, page_of(name))
    page = assert_self_contained(path)
    plain = tmp_path / "plain.html"
    write(plain, page_of("a plain name"))
    assert [tag for tag, _ in page.tags] == [tag for tag, _ in assert_self_contained(plain).tags]
    assert page.text.count(name) >= 10
    rows = page.specs[0]["data"]["values"]
    assert rows[0] == {"label": name, "noise": 1.0, "shown": name}


def test_a_link_to_a_report_stays(tmp_path: Path) -> None:
    """The file that it names is written, also a new one; a link to itself is refused."""
    (tmp_path / "shared").mkdir()
    link, target = tmp_path / "report.html", tmp_path / "shared" / "page.html"
    link.symlink_to(target)
    for name in ("first", "second"):
        write(link, page_of(name))
        assert link.is_symlink() and name in target.read_text()
    loop = tmp_path / "loop.html"
    loop.symlink_to(loop)
    with pytest.raises(OutputError, match="a link to itself"):
        write(loop, page_of("third"))
    assert loop.is_symlink() and [path.name for path in target.parent.iterdir()] == ["page.html"]


@needs_chromium
@pytest.mark.parametrize("name", HOSTILE)
def test_names_never_run(name: str, tmp_path: Path) -> None:
    """Neither from the document nor from what is shown when a mark is pointed at."""
    path = tmp_path / "report.html"
    write(path, page_of(name))
    with shown(path, "light", 1200) as page:
        bar = page.locator(".chart").first.locator(".mark-rect.role-mark path").first
        bar.hover(force=True)
        tooltip = page.locator("#vg-tooltip-element.visible")
        tooltip.wait_for()
        assert tooltip.locator("img, script").count() == 0
        assert name.replace("\u2028", "").replace("\u2029", "")[:8] in tooltip.inner_text().replace("\u2028", "")
        assert page.locator("img").count() == 0


def test_charts_hold_their_values() -> None:
    rows = [charts.Interval("kl", 0.5, (0.25, 1.0), "0.5"), charts.Interval("x", float("nan"), None, "1")]
    drawn = charts.intervals("t", rows, "nats")
    zero, band, *_ = (layer["data"]["values"] for layer in drawn.spec["layer"])
    assert zero == [{"value": 0}]
    assert band == [
        {"label": "kl", "value": 0.5, "low": 0.25, "high": 1.0, "shown": "0.5"},
        {"label": "x", "value": None, "low": None, "high": None, "shown": "1"},
    ]
    assert drawn.spec["width"] == "container" and "config" not in drawn.spec and "$schema" not in drawn.spec


def test_a_missing_extra_is_one_line_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    assert run(["plan", "--html", str(tmp_path / "plan.html")]) == 3
    error = capsys.readouterr().err
    assert error == 'error: --html: vl_convert not installed\n  fix: pip install "glm5-ascend[report]"\n'
    assert not list(tmp_path.iterdir())
