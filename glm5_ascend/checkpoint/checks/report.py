"""The result of a verification: findings, counts, and the weight errors of a comparison."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from glm5_ascend.errors import EXIT_CHECK_FAILED, EXIT_OK, CheckpointError, json_frame, printable

#: A damaged shard can spoil thousands of tensors: `lines` prints this many findings of one kind, `to_dict` all.
LINES_PER_KIND = 8


@dataclass(frozen=True)
class CheckpointFinding:
    """One defect; `tensor` and `file` say where, `fix` says what to do about it."""

    id: str  # stable, e.g. "tensor.missing"
    level: Literal["error", "warning"]
    message: str
    tensor: str | None = None
    file: str | None = None
    fix: str = ""

    def line(self) -> str:
        """Format level, id, file, tensor and message as one printable line, without the fix."""
        where = ": ".join(word for word in (self.file, self.tensor) if word)
        return printable(f"{self.level} [{self.id}] {where + ': ' if where else ''}{self.message}")


@dataclass(frozen=True)
class WeightError:
    """rms(W_deq - W_ref) / rms(W_ref) of one tensor; `worst_row` is the same for its worst row alone."""

    module: str
    scheme: str
    relative_error: float
    worst_row: float
    limit: float


@dataclass(frozen=True)
class EngineNote:
    """One fact about an engine; `flag` is the option to pass, `source` the line of its code."""

    what: str
    source: str
    flag: str = ""


@dataclass
class EngineAnswer:
    """An engine's answer to a checkpoint: `loads` is False if it would stop or load something else."""

    name: str
    version: str
    loads: bool
    notes: list[EngineNote]

    def lines(self) -> list[str]:
        verdict = "loads it" if self.loads else "does not load it correctly, see the errors"
        notes = [f"    {n.flag + ': ' if n.flag else ''}{n.what} ({n.source})" for n in self.notes]
        return [f"{self.version}: {verdict}", *notes]


@dataclass
class Report:
    """The result of `verify`.

    Attributes:
        errors_by_tensor: None if no source was given.
        unchecked: what this run did not check, one sentence each.
        file_of: tensor -> file; findings about a tensor take their file from here.
    """

    directory: Path
    against: Path | None = None
    findings: list[CheckpointFinding] = field(default_factory=list)
    errors_by_tensor: list[WeightError] | None = None
    tensors: int = 0
    bytes: int = 0
    schemes: dict[str, int] = field(default_factory=dict)  # linears by type
    unchecked: list[str] = field(default_factory=list)
    engine: EngineAnswer | None = None  # for `--engine`
    file_of: Mapping[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """True if there is no error; warnings do not count."""
        return not any(finding.level == "error" for finding in self.findings)

    @property
    def exit_code(self) -> int:
        return EXIT_OK if self.ok else EXIT_CHECK_FAILED

    def error(self, id: str, message: str, *, tensor: str | None = None, file: str | None = None, fix: str) -> None:
        self._add("error", id, message, tensor, file, fix)

    def warning(self, id: str, message: str, *, tensor: str | None = None, file: str | None = None, fix: str) -> None:
        self._add("warning", id, message, tensor, file, fix)

    def _add(
        self, level: Literal["error", "warning"], id: str, message: str, tensor: str | None, file: str | None, fix: str
    ) -> None:
        file = file or self.file_of.get(tensor or "")
        if file:  # readers of a file put its path in front; the finding names it already
            message = message.removeprefix(f"{self.directory / file}: ")
        self.findings.append(CheckpointFinding(id, level, message, tensor, file, fix))

    def raise_first_error(self, default_file: str) -> None:
        """Raise `CheckpointError` for the first error; `default_file` is the file of an error that names none."""
        errors = [finding for finding in self.findings if finding.level == "error"]
        if errors:
            more = f" ({len(errors) - 1} more: glm5-ascend verify names them)" if len(errors) > 1 else ""
            file = errors[0].file or default_file
            fix = errors[0].fix if file == default_file else "correct it, or download this file again"
            raise CheckpointError(f"{self.directory / file}: {errors[0].message}{more}", fix)

    def to_dict(self) -> dict[str, Any]:
        """Return the data of `--json`: strings, numbers, lists and dictionaries only."""
        return json_frame("verify", self.exit_code) | {
            "directory": str(self.directory),
            "against": str(self.against) if self.against else None,
            "counts": {"tensors": self.tensors, "bytes": self.bytes, "schemes": dict(sorted(self.schemes.items()))},
            "findings": [asdict(finding) for finding in self.findings],
            "unchecked": self.unchecked,
            "errors": None if self.errors_by_tensor is None else [_finite(asdict(e)) for e in self.errors_by_tensor],
            "engine": None if self.engine is None else asdict(self.engine),
        }

    def lines(self, quiet: bool = False) -> list[str]:
        """The report as text, one fact per line; the last line is the verdict. `quiet`: findings only."""
        types = ", ".join(f"{count} {scheme}" for scheme, count in sorted(self.schemes.items()))
        head = f"{self.directory}: {self.tensors} tensors, {self.bytes / 1e6:.2f} MB; linears: {types or 'unknown'}"
        out = [] if quiet else [printable(head)]
        shown: Counter[str] = Counter()
        for finding in sorted(self.findings, key=lambda f: f.level):  # "error" sorts before "warning"
            shown[finding.id] += 1
            if shown[finding.id] <= LINES_PER_KIND:
                out += [finding.line()] + ([printable(f"    fix: {finding.fix}")] if finding.fix else [])
        out += [f"... {n - LINES_PER_KIND} more [{id}]" for id, n in shown.items() if n > LINES_PER_KIND]
        if quiet:
            return out
        out += self._error_lines()
        out += [printable(f"not checked: {sentence}") for sentence in self.unchecked]
        out += [printable(line) for line in (self.engine.lines() if self.engine else ())]
        errors = sum(finding.level == "error" for finding in self.findings)
        warnings = len(self.findings) - errors
        return [*out, f"{'ok' if self.ok else 'NOT ok'}: {errors} errors, {warnings} warnings"]

    def _error_lines(self) -> list[str]:
        by_scheme: dict[str, list[WeightError]] = {}
        for error in self.errors_by_tensor or ():
            by_scheme.setdefault(error.scheme, []).append(error)
        out = []
        for scheme, rows in sorted(by_scheme.items()):
            worst = max(rows, key=lambda row: row.relative_error)
            mean = sum(row.relative_error for row in rows) / len(rows)
            out.append(
                printable(
                    f"against {self.against}: {scheme}: {len(rows)} tensors, relative error mean {mean:.4f}, "
                    f"worst {worst.relative_error:.4f} ({worst.module})"
                )
            )
        return out


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: an error too large for a number becomes null."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
