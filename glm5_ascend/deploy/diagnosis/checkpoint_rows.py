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
from glm5_ascend.errors import ConfigError


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
    results = preflight(profile, checkpoint, role, flags)
    rows = [row for result in results for row in _role_rows(profile, result)]
    wrong = None if checkpoint is None else other_weights(profile, checkpoint)
    return rows if wrong is None else [DoctorRow("checkpoint", wrong.message, "problem", wrong.tip), *rows]


def other_weights(profile: Profile, checkpoint: CheckpointSummary) -> ConfigError | None:
    """Return the error of weights of other types than the profile is for; None for suitable ones."""
    for layers, has in (("experts", checkpoint.experts), ("attention", checkpoint.attention)):
        expected = profile.weights[layers]
        if expected not in ("any", has):
            return ConfigError(
                f"profile {profile.name} is for {layers} in {expected}, {checkpoint.directory} has {has}",
                f"quantize with --recipe {profile.weights['recipe']}, or choose another profile",
            )
    return None


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
        note += f"; versions assumed as of {result.line.name}: this machine is not an Atlas"
    verdict = f"{name}: {checked} rules checked, {len(rows)} broken"
    changed = [f"{key}={users} (the profile: {value})" for key, (users, value) in result.users_variables.items()]
    return [
        *rows,
        *(DoctorRow("environment", f"{name}: kept from your environment: {line}", "info") for line in changed),
        DoctorRow("profile", verdict, "info" if rows else "ok", note if result.unchecked else profile.status),
    ]


def broken_rule_row(name: str, broken: BrokenRule) -> DoctorRow:
    status = "problem" if broken.level == ERROR else "warning"
    return DoctorRow(broken.id, f"{name}: {broken.message}", status, broken.fix, broken.id, broken.source)
