"""Rows of `doctor --rehearse`: what vllm-ascend's own code makes of the ends of every role."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from glm5_ascend.deploy.diagnosis.row import OK, PROBLEM, DoctorRow
from glm5_ascend.deploy.profiles.load import Profile
from glm5_ascend.deploy.rehearsal.environment import named


def rehearsal_rows(
    directory: Path, profile: Profile, role: str | None, flags: Sequence[str] = ()
) -> Iterator[DoctorRow]:
    """One row per rank and problem; a rank without one has a row, too."""
    from glm5_ascend.deploy.rehearsal.run import (
        Stage,
        rehearse_role,
        require_vllm_ascend,
    )  # reads headers, for which torch is loaded

    require_vllm_ascend(profile)
    environment = named(None)
    for one in profile.roles.values() if role is None else [profile.role(role)]:
        for rank in rehearse_role(Stage(environment, profile, one, directory, list(flags)), "ends"):
            item = f"rehearsal, {rank.role} rank {rank.rank} of {rank.world}"
            for problem in rank.problems:
                yield DoctorRow(item, problem, PROBLEM, "glm5-ascend rehearse shows all of it", id="rehearsal")
            if not rank.problems:
                weight = f"{(rank.found.resident_bytes or 0) / 1e9:.2f} GB of weights"
                yield DoctorRow(item, f"built, loaded and walked, {weight}", OK, "nothing was computed")
