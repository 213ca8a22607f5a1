"""A report as one HTML file: nothing is loaded from anywhere; readable on a phone, light and dark."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from glm5_ascend.errors import MissingEnvironmentError, OutputError
from glm5_ascend.files.written import write_named
from glm5_ascend.report.content import Chart, Page

_MADE_BY = '<meta name="generator" content="glm5-ascend">'


def render(page: Page) -> str:
    """The whole document.

    Names in it may come from an untrusted checkpoint. They stay text: the template escapes them, specifications of
    charts are JSON without `<`, and the page's policy allows only the two scripts whose hashes it lists.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(loader=PackageLoader(__name__.rpartition(".")[0]), autoescape=True,
                              undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)  # fmt: skip
    templates = files(__name__.rpartition(".")[0]) / "templates"
    has_charts = any(isinstance(block, Chart) for section in page.sections for block in section.blocks)
    page_script = (templates / "page.js").read_text(encoding="utf-8")
    scripts = [_vega(), page_script] if has_charts else [page_script]
    return environment.get_template("page.html.j2").render(
        page=page,
        made_by=_MADE_BY,
        style=(templates / "page.css").read_text(encoding="utf-8"),
        scripts=scripts,
        hashes=[_hash(script) for script in scripts],
    )


def _vega() -> str:
    import vl_convert

    return vl_convert.javascript_bundle()  # type: ignore[call-arg]  # its stub forgets that the snippet may be left out


def _hash(script: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() + "'"


def check_path(path: Path) -> None:
    """Check before the work that a report can be written: only an older report is replaced.

    Raises:
        MissingEnvironmentError: the extra `report` is not installed.
        OutputError: the path is another file, or its directory does not exist.
    """
    missing = [name for name in ("altair", "vl_convert") if find_spec(name) is None]
    if missing:
        problem = f"--html: {' and '.join(missing)} not installed"
        raise MissingEnvironmentError(problem, 'pip install "glm5-ascend[report]"')
    if not path.parent.is_dir():
        raise OutputError(f"{path.parent}: no such directory", "create it, or name another file with --html")
    if path.is_dir():
        raise OutputError(f"{path}: is a directory", "name a file with --html")
    if path.exists() and not path.is_file():  # a device gives bytes without end, a FIFO none
        raise OutputError(f"{path}: not a regular file", "name another file with --html")
    if path.exists() and not _is_report(path):
        raise OutputError(f"{path}: exists and is not a report of this tool", "name another file with --html")


def _is_report(path: Path) -> bool:
    with path.open("rb") as file:
        return _MADE_BY.encode() in file.read(1000)


def write(path: Path, page: Page) -> None:
    """Write a report; an older report is replaced.

    Raises:
        MissingEnvironmentError: the extra `report` is not installed.
        OutputError: the path is another file, or cannot be written; nothing has changed.
    """
    check_path(path)
    write_named(path, render(page))
