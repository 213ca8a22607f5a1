"""`glm5-ascend deploy list`: a summary of every profile."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from glm5_ascend.deploy.profiles.load import load, names


@dataclass(frozen=True)
class ListedProfile:
    """Summary of a profile. on: scheduling switches that are on in at least one role."""

    name: str
    title: str
    platform: str
    line: str
    status: str
    roles: tuple[str, ...]
    on: tuple[str, ...]


def listed_profiles() -> list[ListedProfile]:
    """All profiles that can be served, by name."""
    return [
        ListedProfile(
            profile.name, profile.title, profile.platform, profile.line.name, profile.status, tuple(profile.roles),
            tuple(key.replace("_", "-") for key, switch in profile.scheduling.items() if switch.on),
        )
        for profile in map(load, names())
    ]  # fmt: skip


def to_dict(profiles: list[ListedProfile]) -> dict[str, Any]:
    """The data of `--json`."""
    return {
        "schema_version": 1, "command": "deploy list", "ok": True, "exit_code": 0,
        "profiles": [asdict(profile) for profile in profiles],
    }  # fmt: skip
