"""What a quantization has finished, on disk before it counts: the same command goes on from here after any kill."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glm5_ascend.checkpoint.writer import disk_error
from glm5_ascend.errors import OutputError
from glm5_ascend.quantize.run.blocks import ErrorSums

#: 2: rot.weight lies in a file of its own.
FORMAT = 2


@dataclass(frozen=True)
class WorkUnit:
    """A unit of work by its name in the journal."""

    name: str

    @classmethod
    def layer(cls, layer: int) -> WorkUnit:
        """A whole layer, its residual stream included."""
        return cls(f"layer {layer}")

    @classmethod
    def backbone(cls, layer: int) -> WorkUnit:
        """Everything of a layer but the routed experts."""
        return cls(f"layer {layer} backbone")

    @classmethod
    def expert(cls, layer: int, expert: int) -> WorkUnit:
        return cls(f"layer {layer} expert {expert}")


#: What lies outside the layers: embedding, head, final norm, rotation.
GLOBALS = WorkUnit("globals")


@dataclass(frozen=True)
class UnitRecord:
    """What the journal keeps of a unit whose weights were rounded.

    Attributes:
        errors: sums over its linears.
        cold: an expert that saw too few tokens for a search.
    """

    errors: ErrorSums = field(default_factory=dict)
    cold: bool = False


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
        self._done: dict[str, UnitRecord] = {}  # by the unit's name
        try:
            lines = _whole_lines(path)
            if lines:
                _compare(path, lines[0], {"format": FORMAT, **identity})
                self._take(lines[1:])
            self._file = path.open("r+b" if path.exists() else "x+b")
            self._file.truncate(sum(len(_encode(line)) for line in lines))
            self._file.seek(0, os.SEEK_END)
        except OSError as error:
            raise disk_error(path, error) from None
        if not lines:
            self._append({"format": FORMAT, **identity})

    def __contains__(self, unit: WorkUnit) -> bool:
        return unit.name in self._done

    def __len__(self) -> int:
        return len(self._done)

    def record(self, unit: WorkUnit) -> UnitRecord:
        """Of a finished unit; KeyError for another."""
        return self._done[unit.name]

    def refresh(self) -> None:
        """Take over what the other ranks, of this run or a stopped one, have finished."""
        for path in sorted(self.path.parent.glob("journal*.jsonl")):
            self._take(_whole_lines(path)[1:])

    def finish(self, unit: WorkUnit, record: UnitRecord | None = None) -> None:
        """Record a unit whose data is on disk."""
        self._done[unit.name] = record or UnitRecord()
        facts = {} if record is None else {"errors": record.errors, "cold": record.cold}
        self._append({"unit": unit.name, **facts})

    def _take(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            self._done[line["unit"]] = UnitRecord(line.get("errors", {}), line.get("cold", False))

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
    lines: list[dict[str, Any]] = []
    if not path.is_file():
        return lines
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            value = json.loads(line)
        except ValueError:
            break
        if not line.endswith(b"\n") or not isinstance(value, dict) or _encode(value) != line:
            break
        lines.append(value)
    return lines


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
