"""Every hostile input ends in a documented exit code and at most two lines, and touches nothing of the user's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hostile.corpus import Case, cases
from tests.support.command import glm5_ascend

CODES = (0, 1, 2, 3, 130)


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of every file, links and FIFOs unopened."""
    states = {}
    for path in sorted(folder.rglob("*")):
        state = path.lstat()
        states[str(path)] = (state.st_size, state.st_mtime_ns)
    return states


def wrong(case: Case, folder: Path, source: Path) -> str | None:
    """Describe what went wrong; None if nothing did."""
    folder.mkdir()
    words = case.make(folder, source)
    before = contents(folder), contents(source)
    done = glm5_ascend(*words)
    if done.returncode not in CODES or "Traceback" in done.stderr:
        return f"code {done.returncode}: {done.stderr[-1500:]}"
    lines = [line for line in done.stderr.splitlines() if not line.startswith("warning")]
    if done.returncode not in (0, 1) and not 1 <= len(lines) <= 2:
        return f"{len(lines)} lines: {done.stderr[:500]!r}"
    if len(done.stderr) > 20_000 or not all(line.isprintable() for line in lines):
        return f"long, or control characters: {done.stderr[:300]!r}"
    if any(not (character.isprintable() or character in "\n\t") for character in done.stdout):
        return f"control characters on stdout: {done.stdout[:300]!r}"
    after = contents(folder), contents(source)
    unchanged = {name: state for name, state in after[0].items() if name in before[0]}
    new = [name for name in after[0] if name not in before[0] and not name.startswith(str(folder / "out"))]
    if unchanged != before[0] or after[1] != before[1] or (new and done.returncode != 0):
        return f"files changed: {new or 'the user' + chr(39) + 's'}"
    return None


def check(selected: list[Case], folder: Path, source: Path) -> None:
    problems = {}
    for number, case in enumerate(selected):
        if problem := wrong(case, folder / str(number), source):
            problems[f"{case.kind}: {case.name}"] = problem
    assert not problems, "\n".join(f"{name}: {problem}" for name, problem in problems.items())


def test_some_of_each_kind(tmp_path: Path, tiny_source: Path) -> None:
    check(cases()[::53], tmp_path, tiny_source)


@pytest.mark.long
def test_all(tmp_path: Path, tiny_source: Path) -> None:
    check(cases(), tmp_path, tiny_source)
