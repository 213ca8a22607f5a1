"""One page from its parts: hostile names stay text."""

from __future__ import annotations

from pathlib import Path

import pytest

from glm5_ascend.errors import OutputError
from glm5_ascend.report.page import Page, ReportVerdict, Section, write
from tests.support.report_page import assert_self_contained

HOSTILE = (
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "\u2028alert(1)\u2029",
    "\"'><img src=x onerror=alert(1)>",
    "{{ 7*7 }}{% raw %}",
)


def page_of(name: str) -> Page:
    sections = [Section(name, [name], [name], [[name]], [1.0]), Section(name, code=name)]
    return Page(name, ReportVerdict("poor", name, name, name, (name,)), [name], sections)


@pytest.mark.parametrize("name", HOSTILE)
def test_names_never_become_markup(name: str, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write(path, page_of(name))
    page = assert_self_contained(path)
    plain = tmp_path / "plain.html"
    write(plain, page_of("a plain name"))
    assert [tag for tag, _ in page.tags] == [tag for tag, _ in assert_self_contained(plain).tags]
    assert page.text.count(name) >= 10


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
