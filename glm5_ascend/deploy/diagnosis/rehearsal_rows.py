"""Rows of `doctor --rehearse`: first and last ranks of every role, run by vllm-ascend's code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from glm5_ascend.deploy.diagnosis.row import OK, PROBLEM, DoctorRow
from glm5_ascend.deploy.profiles.load import Profile
from glm5_ascend.deploy.rehearsal.environment import find_environment


def rehearsal_rows(
    directory: Path, profile: Profile, role: str | None, flags: Sequence[str] = ()
) -> Iterator[DoctorRow]:
    """One row per problem of a rank; a rank without problems has one row, too."""
    from glm5_ascend.deploy.rehearsal.run import (
        RehearsedRole,
        rehearse_role,
        require_vllm_ascend,
    )  # reads headers, for which torch is loaded

    require_vllm_ascend(profile)
    environment = find_environment(None)
    for one in profile.roles.values() if role is None else [profile.role(role)]:
        for rank in rehearse_role(RehearsedRole(environment, profile, one, directory, list(flags)), "ends"):
            item = f"rehearsal, {rank.role} rank {rank.rank} of {rank.world}"
            for problem in rank.problems:
                yield DoctorRow(item, problem, PROBLEM, "glm5-ascend rehearse shows all of it", id="rehearsal")
            if not rank.problems:
                weight = f"{(rank.report.resident_bytes or 0) / 1e9:.2f} GB of weights"
                yield DoctorRow(item, f"built, loaded and walked, {weight}", OK, "nothing was computed")
