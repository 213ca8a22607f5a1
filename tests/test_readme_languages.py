"""README.zh-CN.md says what README.md says: the same code, headings of the same levels, the same links."""

from __future__ import annotations

import re

from tests.support.documents import blocks, document, headings, prose

ENGLISH, CHINESE = document("README.md"), document("README.zh-CN.md")


def test_the_same_code() -> None:
    assert blocks(CHINESE) == blocks(ENGLISH)
    assert len(blocks(ENGLISH)) == 7


def test_the_same_headings() -> None:
    assert [level for level, _ in headings(CHINESE)] == [level for level, _ in headings(ENGLISH)]


def test_the_same_links_and_code_words() -> None:
    for pattern in (r"\]\(([^)]+)\)", r"`([^`]+)`"):
        found = [sorted(re.findall(pattern, prose(text))) for text in (CHINESE, ENGLISH)]
        assert [set(found[0]) - {"README.md"}, len(found[0])] == [set(found[1]) - {"README.zh-CN.md"}, len(found[1])]
