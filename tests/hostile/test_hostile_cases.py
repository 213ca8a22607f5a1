"""Every hostile input ends in a documented exit code and at most two lines, and touches nothing of the user's."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hostile.corpus import Case, cases
from tests.support.command import environment

#: Only ends what hangs.
TIMEOUT_S = 300
CODES = (0, 1, 2, 3, 130)


class Worker:
    """A process that runs cases; a new one after one that died."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None

    def run(self, words: list[str]) -> dict[str, Any]:
        if self.process is None:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.hostile.worker"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(),
            )  # fmt: skip
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        if not select.select([self.process.stdout], [], [], TIMEOUT_S)[0]:
            return self._died("no end")
        line = self.process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else self._died("the process died")
        return answer

    def _died(self, why: str) -> dict[str, Any]:
        self.end()
        return {"code": why, "out": "", "err": ""}

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of every file, links and FIFOs unopened."""
    states = {}
    for path in sorted(folder.rglob("*")):
        state = path.lstat()
        states[str(path)] = (state.st_size, state.st_mtime_ns)
    return states


def wrong(case: Case, worker: Worker, folder: Path, source: Path) -> str | None:
    """Describe what went wrong; None if nothing did."""
    folder.mkdir()
    words = case.make(folder, source)
    before = contents(folder), contents(source)
    done = worker.run(words)
    if done["code"] not in CODES:
        return f"code {str(done['code'])[-1500:]}"
    lines = [line for line in done["err"].splitlines() if not line.startswith("warning")]
    if done["code"] not in (0, 1) and not 1 <= len(lines) <= 2:
        return f"{len(lines)} lines: {done['err'][:500]!r}"
    if len(done["err"]) > 20_000 or not all(line.isprintable() for line in lines):
        return f"long, or control characters: {done['err'][:300]!r}"
    if any(not (character.isprintable() or character in "\n\t") for character in done["out"]):
        return f"control characters on stdout: {done['out'][:300]!r}"
    after = contents(folder), contents(source)
    unchanged = {name: state for name, state in after[0].items() if name in before[0]}
    new = [name for name in after[0] if name not in before[0] and not name.startswith(str(folder / "out"))]
    if unchanged != before[0] or after[1] != before[1] or (new and done["code"] != 0):
        return f"files changed: {new or 'the user' + chr(39) + 's'}"
    return None


def check(selected: list[Case], folder: Path, source: Path) -> None:
    worker, problems = Worker(), {}
    try:
        for number, case in enumerate(selected):
            if problem := wrong(case, worker, folder / str(number), source):
                problems[f"{case.kind}: {case.name}"] = problem
    finally:
        worker.end()
    assert not problems, "\n".join(f"{name}: {problem}" for name, problem in problems.items())


def test_some_of_each_kind(tmp_path: Path, tiny_source: Path) -> None:
    check(cases()[::37], tmp_path, tiny_source)


@pytest.mark.long
def test_all(tmp_path: Path, tiny_source: Path) -> None:
    check(cases(), tmp_path, tiny_source)
