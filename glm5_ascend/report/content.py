"""The parts of a report before they are HTML. All text is plain: the template escapes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from glm5_ascend.report.header import ReportHeader
from glm5_ascend.report.verdict import ReportVerdict


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
    form: str = "table"


@dataclass(frozen=True)
class Chart:
    """A Vega-Lite specification with its title."""

    title: str
    spec: dict[str, Any]
    form: str = "chart"


@dataclass(frozen=True)
class Code:
    """Text in a fixed-width font."""

    text: str
    form: str = "code"


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
