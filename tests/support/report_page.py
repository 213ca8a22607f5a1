"""A report as a browser's parser splits it."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

#: Attributes that make a browser load something.
_LOADS = {"src", "srcset", "poster", "data", "action", "formaction", "background", "ping"}


class ReadPage(HTMLParser):
    """A document; tags: (name, attributes). text: everything a reader sees."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(document)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data: str) -> None:
        self.text += data if self.tags and self.tags[-1][0] != "style" else ""


def assert_self_contained(report: Path) -> ReadPage:
    """Nothing is loaded from anywhere, and no script runs; the page's policy says so, too."""
    page = ReadPage(report.read_text(encoding="utf-8"))
    policy = next(a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"
    for tag, attributes in page.tags:
        assert tag not in ("script", "link", "base", "iframe", "object", "embed", "img", "form"), tag
        assert not _LOADS & set(attributes), (tag, attributes)
        assert not any(name.startswith("on") for name in attributes), (tag, attributes)
        assert "href" not in attributes, attributes
    return page
