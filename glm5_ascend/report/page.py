"""A report as one HTML file without scripts: nothing is loaded from anywhere; readable on a phone, light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from glm5_ascend.errors import OutputError
from glm5_ascend.files.written import write_named
from glm5_ascend.report import origin

_MADE_BY = '<meta name="generator" content="glm5-ascend">'
Grade = Literal["good", "fair", "poor", "open"]


@dataclass(frozen=True)
class ReportVerdict:
    """One sentence, the threshold, the reason for the threshold, and warnings.

    Attributes:
        grade: gives the colour of the page; "open" if there is nothing to judge.
    """

    grade: Grade
    text: str
    threshold: str
    reason: str
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Section:
    """A title with notes, and a table or a text in a fixed-width font.

    Attributes:
        head, rows: text of the cells.
        bars: a number of at least 0 for each row, drawn as a bar behind it.
    """

    title: str
    notes: Sequence[str] = ()
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    bars: Sequence[float] = ()
    code: str = ""


@dataclass(frozen=True)
class Page:
    """A whole report."""

    title: str
    verdict: ReportVerdict
    intro: Sequence[str]
    sections: Sequence[Section]


def check_path(path: Path) -> None:
    """Check before the work that a report can be written: only an older report is replaced.

    Raises:
        OutputError: the path is something else, or its directory does not exist.
    """
    if not path.parent.is_dir():
        raise OutputError(f"{path.parent}: no such directory", "create it, or name another file with --html")
    if path.exists() and not _is_report(path):
        raise OutputError(f"{path}: exists and is not a report of this tool", "name another file with --html")


def _is_report(path: Path) -> bool:
    if not path.is_file():  # a device gives bytes without end, a FIFO none
        return False
    with path.open("rb") as file:
        return _MADE_BY.encode() in file.read(1000)


def write(path: Path, page: Page) -> None:
    """Write a report; an older report is replaced.

    Names in it may come from an untrusted checkpoint. They stay text: the template escapes them, and the page's policy
    allows no script.

    Raises:
        OutputError: the path is another file, or cannot be written; nothing has changed.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    check_path(path)
    loader = PackageLoader(__name__.rpartition(".")[0])
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    details = {"date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", "machine": origin.machine(), **origin.versions()}
    template = environment.get_template("page.html.j2")
    write_named(path, template.render(page=page, made_by=_MADE_BY, command=origin.command_line(), details=details))
