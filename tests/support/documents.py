"""The documents of the repository: their code blocks, sections and headings."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.support.command import ROOT

FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block of code: its language (bash, python, text ...) and what stands between the fences."""

    language: str
    text: str


def document(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def documents() -> list[str]:
    """Paths of all Markdown files of the repository, relative to its root."""
    own = (path.relative_to(ROOT) for path in ROOT.rglob("*.md"))
    outside = {"work", "build", "dist"}  # what was made here
    return sorted(
        path.as_posix()
        for path in own
        if path.parts[:2] != ("glm5_ascend", "data")  # links to folders that are read anyway
        and not any(part in outside or part.startswith(".venv") or part.endswith("cache") for part in path.parts)
    )


def blocks(text: str) -> list[Block]:
    return [Block(*found) for found in FENCED.findall(text)]


def prose(text: str) -> str:
    """The text without its blocks of code."""
    return FENCED.sub("", text)


def headings(text: str) -> list[tuple[int, str]]:
    """(level, words) of every heading."""
    return [(len(marks), words) for marks, words in re.findall(r"^(#+) (.*)$", prose(text), re.MULTILINE)]


def section(text: str, heading: str) -> str:
    """From a heading of any level to the next of the same or a higher one."""
    found = re.search(rf"^(#+) {re.escape(heading)}$", text, re.MULTILINE)
    assert found, f"no heading {heading!r}"
    end = re.search(rf"^#{{1,{len(found[1])}}} ", FENCED.sub(_blank, text)[found.end() :], re.MULTILINE)
    return text[found.start() : found.end() + end.start() if end else None]


def _blank(found: re.Match[str]) -> str:
    """Comments in code are no headings: blanks of the same length."""
    return re.sub(r"[^\n]", " ", found[0])


def shell_lines(text: str) -> list[str]:
    """Commands of all bash blocks; lines that end in a backslash are joined with the next."""
    code = "".join(block.text for block in blocks(text) if block.language == "bash")
    return [line for line in code.replace("\\\n", " ").splitlines() if line.strip()]
