"""The journal of a run: its finished units, each recorded after its data is on disk. A killed run resumes from it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glm5_ascend.errors import OutputError, shown
from glm5_ascend.files.written import disk_error, open_own, write_file
from glm5_ascend.quantize.run.blocks import ErrorSums

FORMAT = 4


@dataclass(frozen=True)
class WorkUnit:
    """A unit of work; its name identifies it in the journal."""

    name: str
    layer_number: int = field(default=-1, compare=False)
    expert_number: int | None = field(default=None, compare=False)

    @classmethod
    def layer(cls, layer: int) -> WorkUnit:
        """A whole layer, its residual stream included."""
        return cls(f"layer {layer}", layer)

    @classmethod
    def backbone(cls, layer: int) -> WorkUnit:
        """Everything of a layer but the routed experts."""
        return cls(f"layer {layer} backbone", layer)

    @classmethod
    def expert(cls, layer: int, expert: int) -> WorkUnit:
        return cls(f"layer {layer} expert {expert}", layer, expert)


#: The tensors outside the layers: embedding, head, final norm, rotation.
GLOBALS = WorkUnit("globals")


@dataclass(frozen=True)
class UnitRecord:
    """The journal's record of a finished unit.

    Attributes:
        errors: sums over its linears.
        cold: an expert that saw too few tokens for a search.
        checksum: of the unit's bytes on disk.
    """

    errors: ErrorSums = field(default_factory=dict)
    cold: bool = False
    checksum: str = ""

    @classmethod
    def parse(cls, line: dict[str, Any]) -> UnitRecord:
        """Record in a line of the journal. Raises: ValueError, TypeError where the line is damaged."""
        errors, cold, checksum = line.get("errors", {}), line.get("cold", False), line.get("checksum", "")
        if not isinstance(errors, dict) or not isinstance(cold, bool) or not isinstance(checksum, str):
            raise ValueError("not a record")
        sums = {scheme: (float(error), float(weight)) for scheme, (error, weight) in errors.items()}
        return cls(sums, cold, checksum)

    def to_line(self, name: str) -> dict[str, Any]:
        """JSON object of the journal's line; empty fields are left out."""
        return {"unit": name} | {key: value for key, value in vars(self).items() if value}


class Journal:
    """A file of JSON lines: first the identity of the run, then one line per finished unit.

    A line that a kill cut short does not count.

    Args:
        identity: everything the output depends on, as a flat dict.
    Raises:
        OutputError: the unfinished run has another identity; names the keys that changed.
    """

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self.path = path
        self._head = {"format": FORMAT, **identity}
        self._done: dict[str, UnitRecord] = {}  # by the unit's name
        try:
            self._file = os.fdopen(open_own(path), "r+b")
            lines = _whole_lines(self._file.read())
            if lines:
                _compare(path, lines[0], self._head)
            for line in lines[1:]:
                with suppress(ValueError, TypeError, OverflowError):  # a damaged line: that unit is done again
                    self._done[str(line.get("unit"))] = UnitRecord.parse(line)
            self._file.truncate(sum(len(_encode(line)) for line in lines))
            self._file.seek(0, os.SEEK_END)
        except OSError as error:
            raise disk_error(path, error) from None
        if not lines:
            self._append(self._head)

    def __contains__(self, unit: WorkUnit) -> bool:
        return unit.name in self._done

    def __len__(self) -> int:
        return len(self._done)

    def record(self, unit: WorkUnit) -> UnitRecord:
        """Record of a finished unit. Raises: KeyError for another unit."""
        return self._done[unit.name]

    def finish(self, unit: WorkUnit, record: UnitRecord = UnitRecord()) -> None:
        """Record a unit whose data is on disk."""
        self._done[unit.name] = record
        self._append(record.to_line(unit.name))

    def keep(self, units: Iterable[WorkUnit]) -> None:
        """Remove all other units."""
        self._done = {unit.name: self._done[unit.name] for unit in units}
        lines = [self._head, *(record.to_line(name) for name, record in self._done.items())]
        self.close()
        write_file(self.path, b"".join(_encode(line) for line in lines))
        try:
            self._file = self.path.open("r+b")
        except OSError as error:
            raise disk_error(self.path, error) from None
        self._file.seek(0, os.SEEK_END)

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


def _whole_lines(content: bytes) -> list[dict[str, Any]]:
    """Lines up to the first one that `_encode` did not write."""
    lines: list[dict[str, Any]] = []
    for line in content.splitlines(keepends=True):
        try:
            value = json.loads(line)
            if not line.endswith(b"\n") or not isinstance(value, dict) or _encode(value) != line:
                break
        except (ValueError, RecursionError):
            break
        lines.append(value)
    return lines


def _compare(path: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    changed = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
    if changed:
        key = changed[0]
        raise OutputError(
            f"{path.parent}: holds an unfinished run with another {', '.join(changed)} "
            f"({shown(before.get(key))} then, {shown(now.get(key))} now)",
            "re-run that command to resume it, or pass --restart to discard it",
        )
