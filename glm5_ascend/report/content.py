"""The parts of a report before they are HTML. All text is plain: the template escapes it."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from glm5_ascend.report.header import ReportHeader
from glm5_ascend.report.verdict import ReportVerdict

#: Marks of a chart from which on SVG would be slow.
_CANVAS_MARKS = 4000
_NUMBER = re.compile(r"[+-]?[\d.,]+(?:e[+-]?\d+)?\s?\S{0,3}", re.IGNORECASE)


@dataclass(frozen=True)
class Card:
    """A key figure; `key` is its id in the page."""

    key: str
    value: str
    label: str
    small: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of text with a header row."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    kind: str = "table"

    @property
    def csv(self) -> str:
        """The table as a data: URL of CSV; a quote precedes text that a spreadsheet would run as a formula."""
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows(
            [_no_formula(cell) for cell in row] for row in (self.head, *self.rows)
        )
        return "data:text/csv;charset=utf-8," + quote(out.getvalue())


@dataclass(frozen=True)
class Chart:
    """A Vega-Lite specification with its title and its values as a table."""

    title: str
    spec: dict[str, Any]
    data: Table
    kind: str = "chart"

    @property
    def renderer(self) -> str:
        """The renderer of Vega: "svg", or "canvas" for charts with many marks."""
        return "canvas" if len(self.data.rows) > _CANVAS_MARKS else "svg"


@dataclass(frozen=True)
class Code:
    """Text in a fixed-width font."""

    text: str
    kind: str = "code"


@dataclass(frozen=True)
class Section:
    """A section with an entry in the table of contents; `note` precedes the blocks, `after` follows them."""

    title: str
    blocks: Sequence[Table | Chart | Code] = ()
    note: str = ""
    after: Sequence[str] = ()


@dataclass(frozen=True)
class Page:
    """A whole report."""

    title: str
    header: ReportHeader
    verdict: ReportVerdict
    intro: Sequence[str] = ()
    cards: Sequence[Card] = ()
    sections: Sequence[Section] = field(default_factory=tuple)


def _no_formula(cell: str) -> str:
    return f"'{cell}" if cell[:1] in ("=", "+", "-", "@", "\t", "\r") and not _NUMBER.fullmatch(cell) else cell
