"""Doctor's rows on a checkpoint, and on a profile with it."""

from __future__ import annotations

from collections.abc import Sequence

from glm5_ascend.checkpoint.summary import CheckpointSummary
from glm5_ascend.checkpoint.types import DESCRIPTION_NAME
from glm5_ascend.deploy.diagnosis.preflight import Preflight, preflight
from glm5_ascend.deploy.diagnosis.row import DoctorRow
from glm5_ascend.deploy.profiles.command import verify_name
from glm5_ascend.deploy.profiles.load import Profile
from glm5_ascend.deploy.rules.load import ERROR, BrokenRule, rules


def checkpoint_rows(checkpoint: CheckpointSummary, profile: Profile | None) -> list[DoctorRow]:
    """The quick check of `verify`, for the profile's engine if there is one: files, names, shapes, description."""
    directory = checkpoint.directory
    if not (directory / DESCRIPTION_NAME).is_file():
        return [DoctorRow("checkpoint", f"{directory}: not quantized", "info", "config.json can be served")]
    from glm5_ascend.verify import verify  # loads torch

    engine = None if profile is None else verify_name(profile.engine, profile.platform)
    report = verify(directory, engine=engine, deep=False)
    if report.ok:
        note = "glm5-ascend verify reads the values"
        return [DoctorRow("checkpoint", f"{directory}: quick check passed", "ok", note)]
    fix = f"glm5-ascend verify {directory}"
    return [DoctorRow("checkpoint", f"{directory}: {line}", "problem", fix) for line in report.lines(quiet=True)]


def profile_rows(
    profile: Profile, checkpoint: CheckpointSummary | None, role: str | None, flags: Sequence[str] = ()
) -> list[DoctorRow]:
    """Rows of the rules for each role, or for the named one. flags: the user's flags of the engine."""
    return [row for result in preflight(profile, checkpoint, role, list(flags)) for row in _role_rows(profile, result)]


def _role_rows(profile: Profile, result: Preflight) -> list[DoctorRow]:
    name = profile.name if len(profile.roles) == 1 else f"{profile.name} {result.role}"
    if profile.platform != "npu":
        return [DoctorRow("profile", f"{name}: no rule applies to a CPU", "info", profile.status)]
    rows = [broken_rule_row(name, broken) for broken in result.broken]
    checked = len(rules()) - len(result.unchecked)
    note = f"{len(result.unchecked)} of {len(rules())} rules not checked: " + ", ".join(
        sorted({fact for facts in result.unchecked.values() for fact in facts})
    )
    if result.assumed:
        note += f"; versions assumed as of {profile.line.name}: this machine is not an Atlas"
    verdict = f"{name}: {checked} rules checked, {len(rows)} broken"
    return [
        *rows,
        DoctorRow("profile", verdict, "info" if rows else "ok", note if result.unchecked else profile.status),
    ]


def broken_rule_row(name: str, broken: BrokenRule) -> DoctorRow:
    status = "problem" if broken.level == ERROR else "warning"
    return DoctorRow(broken.id, f"{name}: {broken.message}", status, broken.fix, broken.id, broken.source)
