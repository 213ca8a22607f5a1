"""`glm5-ascend doctor`: what is installed here, what would serve, and what is in the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from glm5_ascend.checkpoint.summary import CheckpointSummary
from glm5_ascend.checkpoint.types import DESCRIPTION_NAME
from glm5_ascend.deploy.diagnosis import machine
from glm5_ascend.deploy.diagnosis.machine import PROBLEM, WARNING, DoctorRow
from glm5_ascend.deploy.options import DoctorOptions
from glm5_ascend.deploy.profiles.command import verify_name
from glm5_ascend.deploy.profiles.load import Profile, load
from glm5_ascend.deploy.rules.load import ERROR, rules
from glm5_ascend.deploy.rules.preflight import Preflight, other_weights, preflight, quick_check
from glm5_ascend.errors import EXIT_CHECK_FAILED, EXIT_ENVIRONMENT, EXIT_OK, ConfigError, json_frame
from glm5_ascend.options import with_options
from glm5_ascend.serve.servable import check_directory


@dataclass(frozen=True)
class Diagnosis:
    """All rows of the report, and what they come to."""

    rows: list[DoctorRow]

    def of(self, status: str) -> list[DoctorRow]:
        return [row for row in self.rows if row.status == status]

    @property
    def exit_code(self) -> int:
        """3: this machine lacks something; 1: a profile or a checkpoint is bad; 0: neither, warnings or not."""
        bad = self.of(PROBLEM)
        return EXIT_OK if not bad else EXIT_ENVIRONMENT if any(row.of_machine for row in bad) else EXIT_CHECK_FAILED

    @property
    def verdict(self) -> str:
        """One line: `ok: ...`, or how many problems and which."""
        problems, warnings = self.of(PROBLEM), self.of(WARNING)
        counts = [f"{len(rows)} {rows[0].status}{'s' * (len(rows) > 1)}" for rows in (problems, warnings) if rows]
        if not problems:
            return ", ".join(["ok: no problems", *counts])
        named = [row.id or (row.value if row.item == "problem" else row.item) for row in problems]
        return f"{', '.join(counts)}: {'; '.join(dict.fromkeys(named))}"

    def to_dict(self) -> dict[str, Any]:
        rows = [asdict(row) for row in self.rows]
        return json_frame("doctor", self.exit_code) | {"verdict": self.verdict, "rows": rows}


@with_options(DoctorOptions)
def doctor(options: DoctorOptions) -> Diagnosis:
    """Check this machine, a checkpoint, a profile: versions, engines that work here, and how to fix the rest.

    Without a checkpoint neither torch nor vLLM is imported.

    Raises:
        ConfigError: unknown profile or role, flags without a profile, or a config.json that vLLM would misread.
        CheckpointError: the directory has no weights, or a description that cannot be read.
    """
    if options.vllm_args and options.profile is None:
        raise ConfigError("flags of the engine, but no profile", "give --profile NAME before --")
    rows = machine.rows()
    checkpoint = None if options.directory is None else check_directory(Path(options.directory))
    profile = None if options.profile is None else load(options.profile)
    if checkpoint is not None:
        rows += checkpoint_rows(checkpoint, profile)
    if profile is not None:
        rows += profile_rows(profile, checkpoint, options.role, options.vllm_args)
    return Diagnosis(rows)


def checkpoint_rows(checkpoint: CheckpointSummary, profile: Profile | None) -> list[DoctorRow]:
    """The quick check of `verify`, for the profile's engine if there is one: files, names, shapes, description."""
    directory = checkpoint.directory
    if not (directory / DESCRIPTION_NAME).is_file():
        return [DoctorRow("checkpoint", f"{directory}: not quantized", "info", "config.json can be served")]
    findings = quick_check(directory, None if profile is None else verify_name(profile.engine, profile.platform))
    if not findings:
        note = "glm5-ascend verify reads the values"
        return [DoctorRow("checkpoint", f"{directory}: quick check passed", "ok", note)]
    fix = f"glm5-ascend verify {directory}"
    return [DoctorRow("checkpoint", f"{directory}: {line}", "problem", fix) for line in findings]


def profile_rows(
    profile: Profile, checkpoint: CheckpointSummary | None, role: str | None, flags: Sequence[str] = ()
) -> list[DoctorRow]:
    """Rows of the rules for each role, or for the named one. flags: the user's flags of the engine."""
    results = preflight(profile, checkpoint, role, flags)
    rows = [row for result in results for row in _role_rows(profile, result)]
    wrong = None if checkpoint is None else other_weights(profile, checkpoint)
    return rows if wrong is None else [DoctorRow("checkpoint", wrong.message, "problem", wrong.tip), *rows]


def _role_rows(profile: Profile, result: Preflight) -> list[DoctorRow]:
    name = profile.name if len(profile.roles) == 1 else f"{profile.name} {result.role}"
    if profile.platform != "npu":
        return [DoctorRow("profile", f"{name}: no rule applies to a CPU", "info", profile.status)]
    status = {ERROR: PROBLEM, WARNING: WARNING}
    rows = [
        DoctorRow(it.id, f"{name}: {it.message}", status[it.level], it.fix, it.id, it.known_from)
        for it in result.broken
    ]
    every, unchecked = len(rules()), len(result.unchecked)
    note = f"{unchecked} of {every} rules not checked: {', '.join(sorted(set(chain(*result.unchecked.values()))))}"
    if result.assumed:
        note += f"; versions assumed as of {result.line.name}: this machine is not an Atlas"
    verdict = f"{name}: {every - unchecked} rules checked, {len(rows)} broken"
    return [
        *rows,
        DoctorRow("profile", verdict, "info" if rows else "ok", note if unchecked else profile.status),
    ]
