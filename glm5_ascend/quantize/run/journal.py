"""What a quantization has finished, on disk before it counts: run the same command again from here after any kill."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glm5_ascend.checkpoint.writer import disk_error
from glm5_ascend.errors import OutputError
from glm5_ascend.files.written import make_room, plain, write_file
from glm5_ascend.quantize.run.blocks import ErrorSums

#: 2: rot.weight lies in a file of its own. 3: with checksums. 4: streams of the sweep for gradients are fp32.
FORMAT = 4
_MAX_BYTES = 512 * 1024**2


@dataclass(frozen=True)
class WorkUnit:
    """A unit of work by its name in the journal; `place` is its layer and routed expert."""

    name: str
    place: tuple[int, int | None] = field(default=(-1, None), compare=False)

    @classmethod
    def layer(cls, layer: int) -> WorkUnit:
        """A whole layer, its residual stream included."""
        return cls(f"layer {layer}", (layer, None))

    @classmethod
    def backbone(cls, layer: int) -> WorkUnit:
        """Everything of a layer but the routed experts."""
        return cls(f"layer {layer} backbone", (layer, None))

    @classmethod
    def expert(cls, layer: int, expert: int) -> WorkUnit:
        return cls(f"layer {layer} expert {expert}", (layer, expert))

    @classmethod
    def streamed(cls, layer: int) -> WorkUnit:
        """The stream behind a layer, of the sweep for gradients."""
        return cls(f"layer {layer} stream", (layer, None))

    @classmethod
    def gradient(cls, layer: int) -> WorkUnit:
        """The gradients in front of a layer."""
        return cls(f"layer {layer} gradient", (layer, None))


#: What lies outside the layers: embedding, head, final norm, rotation.
GLOBALS = WorkUnit("globals")


@dataclass(frozen=True)
class UnitRecord:
    """What the journal keeps of a unit whose weights were rounded.

    Attributes:
        errors: sums over its linears.
        cold: an expert that saw too few tokens for a search.
        checksum: of what the unit left on disk.
    """

    errors: ErrorSums = field(default_factory=dict)
    cold: bool = False
    checksum: str = ""

    @classmethod
    def read(cls, line: dict[str, Any]) -> UnitRecord:
        """From a line of the journal; ValueError where it is none of ours."""
        errors, cold, checksum = line.get("errors", {}), line.get("cold", False), line.get("checksum", "")
        if not isinstance(errors, dict) or not isinstance(cold, bool) or not isinstance(checksum, str):
            raise ValueError("not a record")
        sums = {str(scheme): tuple(float(value) for value in pair) for scheme, pair in errors.items()}
        if not all(len(pair) == 2 for pair in sums.values()):
            raise ValueError("not two sums")
        return cls({scheme: (pair[0], pair[1]) for scheme, pair in sums.items()}, cold, checksum)

    def line(self, name: str) -> dict[str, Any]:
        """For the journal; what is empty is left out."""
        return {"unit": name} | {key: value for key, value in vars(self).items() if value}


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
        self._head = {"format": FORMAT, **identity}
        self._done: dict[str, UnitRecord] = {}  # by the unit's name
        try:
            lines = _whole_lines(path)
            if lines:
                self._take(path, lines)
            self._open(sum(len(_encode(line)) for line in lines))
        except OSError as error:
            raise disk_error(path, error) from None
        if not lines:
            self._append(self._head)

    def _open(self, size: int) -> None:
        """Go on behind the first `size` bytes."""
        make_room(self.path, plain_stays=True)
        descriptor = os.open(self.path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o644)
        self._file = os.fdopen(descriptor, "r+b")
        self._file.truncate(size)
        self._file.seek(0, os.SEEK_END)

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
            self._take(path, _whole_lines(path))

    def finish(self, unit: WorkUnit, record: UnitRecord = UnitRecord()) -> None:
        """Record a unit whose data is on disk."""
        self._done[unit.name] = record
        self._append(record.line(unit.name))

    def keep(self, units: Iterable[WorkUnit]) -> None:
        """Forget all other units, in every rank's file; no other rank may be writing."""
        self._done = {unit.name: self._done[unit.name] for unit in units}
        lines = [self._head, *(record.line(name) for name, record in self._done.items())]
        encoded = b"".join(_encode(line) for line in lines)
        self.close()
        write_file(self.path, encoded)
        try:
            self._open(len(encoded))
            for path in self.path.parent.glob("journal-*.jsonl"):
                make_room(path)
        except OSError as error:
            raise disk_error(self.path, error) from None

    def _take(self, path: Path, lines: list[dict[str, Any]]) -> None:
        if lines:
            _compare(path, lines[0], self._head)
        for line in lines[1:]:
            with suppress(ValueError, TypeError):  # not a line of ours: that unit is done again
                self._done[str(line.get("unit"))] = UnitRecord.read(line)

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
    """None of a file that is missing, or none of ours: a link, say, which is not read."""
    lines: list[dict[str, Any]] = []
    try:
        facts = path.lstat()
    except FileNotFoundError:
        return lines
    if not plain(facts) or facts.st_size > _MAX_BYTES:
        return lines
    for line in path.read_bytes().splitlines(keepends=True):
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
            f"({_short(before.get(key))} then, {_short(now.get(key))} now)",
            "repeat the command of that run to finish it, or pass --restart to discard it",
        )


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
