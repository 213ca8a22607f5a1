"""README.zh-CN.md says what README.md says: the same code, as many headings of the same levels, the same numbers."""

from __future__ import annotations

import re

from tests.support.documents import blocks, document, headings, prose

ENGLISH, CHINESE = document("README.md"), document("README.zh-CN.md")
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


def rows(text: str) -> list[list[list[str]]]:
    """Numbers of every cell of every row of every table, sorted within the cell: languages order words differently."""
    lines = [line for line in prose(text).splitlines() if line.startswith("|")]
    return [[sorted(NUMBER.findall(cell)) for cell in line.split("|")] for line in lines]


def test_the_same_code() -> None:
    assert blocks(CHINESE) == blocks(ENGLISH)
    assert len(blocks(ENGLISH)) == 7


def test_the_same_headings() -> None:
    assert [level for level, _ in headings(CHINESE)] == [level for level, _ in headings(ENGLISH)]


def test_the_same_numbers_in_tables() -> None:
    assert rows(CHINESE) == rows(ENGLISH)
    assert len(rows(ENGLISH)) > 25


def test_the_same_numbers_in_sentences() -> None:
    """Paragraph by paragraph: facts are not added or lost in one language."""

    def numbers(text: str) -> list[list[str]]:
        return [sorted(NUMBER.findall(paragraph)) for paragraph in prose(text).split("\n\n")]

    assert numbers(CHINESE) == numbers(ENGLISH)


def test_the_same_links_and_code_words() -> None:
    for pattern in (r"\]\(([^)]+)\)", r"`([^`]+)`"):
        found = [sorted(re.findall(pattern, prose(text))) for text in (CHINESE, ENGLISH)]
        assert [set(found[0]) - {"README.md"}, len(found[0])] == [set(found[1]) - {"README.zh-CN.md"}, len(found[1])]
