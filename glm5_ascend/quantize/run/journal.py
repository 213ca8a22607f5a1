"""What a quantization has finished, on disk before it counts: the same command goes on from here after any kill."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from glm5_ascend.checkpoint.writer import disk_error
from glm5_ascend.errors import OutputError

FORMAT = 1


class Journal:
    """A file of JSON lines: first what defines the run, then one line per finished unit of work.

    A line that a kill cut short does not count. The caller makes the unit's data durable first. Every rank writes a
    file of its own, `journal.jsonl` and `journal-1.jsonl` ..., and reads them all.

    Args:
        identity: everything the output depends on, as a flat dict; compared with that of the run to continue.
    Raises:
        OutputError: the unfinished run had another identity; says which part changed.
    """

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self.path = path
        self.done: dict[str, dict[str, Any]] = {}  # by unit
        try:
            lines = _whole_lines(path)
            if lines:
                _compare(path, lines[0], {"format": FORMAT, **identity})
                self.done = {line["unit"]: line for line in lines[1:]}
            self._file = path.open("r+b" if path.exists() else "x+b")
            self._file.truncate(sum(len(_encode(line)) for line in lines))
            self._file.seek(0, os.SEEK_END)
        except OSError as error:
            raise disk_error(path, error) from None
        if not lines:
            self._append({"format": FORMAT, **identity})

    def refresh(self) -> None:
        """Take over what the other ranks, of this run or a stopped one, have finished."""
        for path in sorted(self.path.parent.glob("journal*.jsonl")):
            self.done |= {line["unit"]: line for line in _whole_lines(path)[1:]}

    def finish(self, unit: str, **facts: Any) -> None:
        """Record a unit whose data is on disk."""
        self.done[unit] = {"unit": unit, **facts}
        self._append(self.done[unit])

    def _append(self, value: dict[str, Any]) -> None:
        try:
            self._file.write(_encode(value))
            self._file.flush()
            os.fdatasync(self._file.fileno())
        except OSError as error:
            raise disk_error(self.path, error) from None

    def close(self) -> None:
        self._file.close()


def _encode(value: dict[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True).encode() + b"\n"


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if not path.is_file():
        return found
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            value = json.loads(line)
        except ValueError:
            break
        if not line.endswith(b"\n") or not isinstance(value, dict) or _encode(value) != line:
            break
        found.append(value)
    return found


def _compare(path: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    changed = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
    if changed:
        key = changed[0]
        raise OutputError(
            f"{path.parent}: holds an unfinished run with another {', '.join(changed)} "
            f"({_short(before.get(key))} then, {_short(now.get(key))} now)",
            "repeat the command of that run to finish it, or pass --restart to discard it",
        )


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
