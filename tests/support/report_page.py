"""A report in a real browser: Debian's chromium, driven by playwright."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import debian_program

#: These tests belong to `make test-all`, which installs the browser or fails: never are they left out in silence.
needs_chromium = pytest.mark.long
#: Attributes that make a browser load something.
_LOADS = {"src", "srcset", "poster", "data", "action", "formaction", "background", "ping"}


class ReadPage(HTMLParser):
    """A document as a browser's parser splits it: tags with attributes, scripts that run, and JSON.

    Attributes:
        tags: (name, attributes). scripts: text of those that run. specs: of type application/json, parsed.
        text: everything a reader sees.
    """

    def __init__(self, document: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.specs: list[dict[str, Any]] = []
        self.text = ""
        self._inside: list[str] | None = None
        self.feed(document)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag in ("script", "style"):
            self._inside = []

    def handle_data(self, data: str) -> None:
        if self._inside is None:
            self.text += data
        else:
            self._inside.append(data)

    def handle_endtag(self, tag: str) -> None:
        if self._inside is None:
            return
        _, attributes = self.tags[-1]
        if attributes.get("type") == "application/json":
            self.specs.append(json.loads("".join(self._inside)))
        elif tag == "script":
            self.scripts.append("".join(self._inside))
        self._inside = None


def assert_self_contained(report: Path) -> ReadPage:
    """Nothing is loaded from anywhere, and no script runs but ours: those whose hashes the page's policy states."""
    page = ReadPage(report.read_text(encoding="utf-8"))
    policy = next(a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and policy.startswith("default-src 'none'; ")
    allowed = policy.partition("script-src ")[2].split()
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in page.scripts]
    assert allowed == [f"'sha256-{value}'" for value in hashes] and 1 <= len(allowed) <= 2
    for tag, attributes in page.tags:
        assert tag not in ("link", "base", "iframe", "object", "embed", "img", "form"), tag
        assert not _LOADS & set(attributes), (tag, attributes)
        assert not any(name.startswith("on") for name in attributes), (tag, attributes)
        assert (attributes.get("href") or "#").startswith("#"), attributes
    for spec in page.specs:
        assert '"url"' not in json.dumps(spec)
    return page


@contextmanager
def shown(report: Path, scheme: str, width: int) -> Iterator[Any]:
    """The page with its charts; behind the block: nothing was fetched, nothing complained, nothing sticks out."""
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
        page.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requested.append(request.url))
        page.goto(report.as_uri())
        charts = page.locator(".chart").count()
        page.wait_for_function(
            "count => document.querySelectorAll('.chart svg, .chart canvas').length == count", arg=charts
        )
        yield page
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        ink, paper = page.evaluate("(s => [s.color, s.backgroundColor])(getComputedStyle(document.body))")
        bright = [sum(map(int, colour[4:-1].split(","))) for colour in (ink, paper)]
        assert (bright[0] > 600 > 150 > bright[1]) if scheme == "dark" else (bright[0] < 150 < 600 < bright[1])
        browser.close()
    assert complaints == [], complaints
    assert requested == [report.as_uri()]


def marks(page: Any, title: str, kind: str) -> Any:
    """The marks of a kind (rect, symbol, rule, area ...) of the chart `title`."""
    return page.locator(f".chart[data-title='{title}'] .mark-{kind}.role-mark path")


def hovered(page: Any, title: str, kind: str, number: int = 0) -> str:
    """What the page says when a mark is pointed at."""
    mark = marks(page, title, kind).nth(number)
    mark.scroll_into_view_if_needed()
    mark.hover(force=True)
    tooltip = page.locator("#vg-tooltip-element.visible")
    tooltip.wait_for()
    return str(tooltip.inner_text())
