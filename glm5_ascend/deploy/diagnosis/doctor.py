"""`glm5-ascend doctor`: what is installed here, what would serve, and what is in the way."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from glm5_ascend.deploy.diagnosis import machine_rows
from glm5_ascend.deploy.diagnosis.checkpoint_rows import checkpoint_rows, profile_rows
from glm5_ascend.deploy.diagnosis.row import PROBLEM, WARNING, DoctorRow
from glm5_ascend.deploy.options import DoctorOptions
from glm5_ascend.deploy.profiles.load import load
from glm5_ascend.errors import EXIT_CHECK_FAILED, EXIT_ENVIRONMENT, EXIT_OK, ConfigError
from glm5_ascend.options import with_options
from glm5_ascend.serve.servable import check_directory


@dataclass(frozen=True)
class Diagnosis:
    """All rows of the report, and what they come to."""

    rows: list[DoctorRow]

    @property
    def exit_code(self) -> int:
        """3: this machine lacks something; 1: a profile or a checkpoint is bad; 0: neither, warnings or not."""
        bad = [row for row in self.rows if row.status == PROBLEM]
        if not bad:
            return EXIT_OK
        return EXIT_CHECK_FAILED if all(row.id or row.item == "checkpoint" for row in bad) else EXIT_ENVIRONMENT

    @property
    def verdict(self) -> str:
        """One line: `ok: ...`, or how many problems and which."""
        problems = [row for row in self.rows if row.status == PROBLEM]
        warnings = [row for row in self.rows if row.status == WARNING]
        and_warnings = f", {_counted(warnings, 'warning')}" if warnings else ""
        if not problems:
            return f"ok: no problems{and_warnings}"
        named = [row.id or (row.value if row.item == "problem" else row.item) for row in problems]
        return f"{_counted(problems, 'problem')}{and_warnings}: {'; '.join(dict.fromkeys(named))}"

    def to_dict(self) -> dict[str, Any]:
        """The data of `--json`."""
        return {
            "schema_version": 1, "command": "doctor", "ok": self.exit_code == EXIT_OK, "exit_code": self.exit_code,
            "verdict": self.verdict, "rows": [asdict(row) for row in self.rows],
        }  # fmt: skip


@with_options(DoctorOptions)
def doctor(options: DoctorOptions) -> Diagnosis:
    """Check this machine, a checkpoint, a profile: versions, engines that work here, and how to fix the rest.

    Without a checkpoint neither torch nor vLLM is imported.

    Raises:
        ConfigError: unknown profile or role, flags without a profile, or a config.json that vLLM would misread.
        CheckpointError: the directory has no weights, or a description that cannot be read.
    """
    directory, profile, role, vllm_args = options.directory, options.profile, options.role, options.vllm_args
    if vllm_args and profile is None:
        raise ConfigError("flags of the engine, but no profile", "give --profile NAME before --")
    rows = machine_rows.rows()
    checkpoint = None if directory is None else check_directory(Path(directory))
    loaded = None if profile is None else load(profile)
    if checkpoint is not None:
        rows += checkpoint_rows(checkpoint, loaded)
    if loaded is not None:
        rows += profile_rows(loaded, checkpoint, role, vllm_args)
    return Diagnosis(rows)


def _counted(rows: list[DoctorRow], word: str) -> str:
    return f"{len(rows)} {word}" + ("" if len(rows) == 1 else "s")
