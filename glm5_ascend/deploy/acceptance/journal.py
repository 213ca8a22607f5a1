"""The journal of an acceptance, written after each step: run the same command again to resume."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from glm5_ascend.errors import CheckFailedError, Glm5Error
from glm5_ascend.files.untrusted import read_bytes
from glm5_ascend.files.written import write_file

OK, WARNING, FAILED, NOT_RUN = "ok", "warning", "failed", "not run"
NAME = "accept.json"
#: Files up to this size are hashed. Of shards only name and size are recorded; `verify` hashes them.
HASHED_BYTES = 32 * 1024**2
MAX_BYTES = 64 * 1024**2


@dataclass(frozen=True)
class StepResult:
    """One step's outcome.

    Attributes:
        status: OK, WARNING, FAILED or NOT_RUN. verdict: one line. seconds: duration. began: UTC, ISO 8601.
        figures: for the report. send: where to report a failure, and with which files.
    """

    name: str
    status: str
    verdict: str
    seconds: float = 0.0
    began: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    send: str = ""

    @property
    def done(self) -> bool:
        """True if the step need not be repeated."""
        return self.status in (OK, WARNING)


def file_list(directory: Path) -> list[dict[str, Any]]:
    """Names, bytes and, except for shards, SHA-256 of a checkpoint's files, sorted by name."""
    entries = []
    for path in sorted(directory.iterdir()):
        if path.is_file():
            entry: dict[str, Any] = {"name": path.name, "bytes": path.stat().st_size}
            if entry["bytes"] <= HASHED_BYTES:
                entry["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
            entries.append(entry)
    return entries


class AcceptanceJournal:
    """accept.json of one folder: the journal, and at the end the report.

    Args:
        about: what is accepted and how. Results of another acceptance are discarded.
    """

    def __init__(self, folder: Path, about: dict[str, Any]) -> None:
        self.path = folder / NAME
        self.about: dict[str, Any] = json.loads(_text(about))  # as the file gives it back
        self.results: dict[str, StepResult] = self._read()

    def add(self, result: StepResult) -> None:
        """Add a result and write the file. Raises OutputError."""
        self.results[result.name] = result
        self.write({})

    def write(self, more: dict[str, Any]) -> None:
        """Write all steps and `more`. Raises OutputError."""
        steps = [asdict(result) for result in self.results.values()]
        value = {"schema_version": 1, "command": "accept", **more, "about": self.about, "steps": steps}
        write_file(self.path, _text(value))

    def _read(self) -> dict[str, StepResult]:
        """Results of an earlier run of the same acceptance; none if the file was not written by this class."""
        try:
            text = read_bytes(self.path, MAX_BYTES, CheckFailedError, "remove it").decode()
            value = json.loads(text)
            if _text(value) != text or value["about"] != self.about:
                return {}
            results = [StepResult(**step) for step in value["steps"]]
        except (Glm5Error, KeyError, TypeError, ValueError, RecursionError):
            return {}
        return {result.name: result for result in results if result.done}


def _text(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"
