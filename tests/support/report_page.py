"""A report in a real browser: Debian's chromium, driven by playwright."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import debian_program

#: These tests belong to `make test-all`, which installs the browser or fails: never are they left out in silence.
needs_chromium = pytest.mark.long
SCHEMES_AND_WIDTHS = [("light", 360), ("dark", 1200)]


def assert_self_contained(report: Path) -> None:
    """No script, and nothing that would be fetched."""
    text = report.read_text(encoding="utf-8")
    assert "<script" not in text and "http" not in text and "@import" not in text and "url(" not in text


@contextmanager
def shown(report: Path, scheme: str, width: int) -> Iterator[Any]:
    """The page; behind the block: nothing was fetched, nothing complained, nothing sticks out, text is readable."""
    from playwright.sync_api import sync_playwright

    chromium = debian_program("chromium", "chromium")
    if chromium is None:
        pytest.fail("make test-all needs Debian's chromium: apt-get install chromium")
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
        complaints: list[str] = []
        requested: list[str] = []
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requested.append(request.url))
        page.goto(report.as_uri())
        yield page
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        ink, paper = page.evaluate("(s => [s.color, s.backgroundColor])(getComputedStyle(document.body))")
        bright = [sum(map(int, colour[4:-1].split(","))) for colour in (ink, paper)]
        assert (bright[0] > 600 > 150 > bright[1]) if scheme == "dark" else (bright[0] < 150 < 600 < bright[1])
        browser.close()
    assert complaints == []
    assert requested == [report.as_uri()]
