"""The rules over one profile, one checkpoint and this machine."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from packaging.version import InvalidVersion, Version

from glm5_ascend.checkpoint.summary import CheckpointSummary
from glm5_ascend.deploy.diagnosis import machine, weights
from glm5_ascend.deploy.profiles.command import open_command
from glm5_ascend.deploy.profiles.load import Profile, Role
from glm5_ascend.deploy.rules import facts as rule_facts
from glm5_ascend.deploy.rules.load import BrokenRule, judge
from glm5_ascend.deploy.rules.sglang_facts import COMMON, of_sglang_command
from glm5_ascend.engine_lines import NPU, SGLANG
from glm5_ascend.serve import indexer_rotation
from glm5_ascend.serve import versions as sets
from glm5_ascend.serve.activation import ascend_folder, plugin_is_active
from glm5_ascend.serve.environment import version_of


@dataclass(frozen=True)
class Preflight:
    """Result of the rules for one role. assumed: versions are the profile's; its engine is not installed here."""

    profile: str
    role: str
    broken: list[BrokenRule]
    unchecked: dict[str, list[str]]
    assumed: bool


def facts_for(
    profile: Profile, role: Role, checkpoint: CheckpointSummary | None, extra: list[str]
) -> tuple[dict[str, Any], bool]:
    """Collect facts from profile, command line, software, checkpoint and machine; later sources override earlier ones.

    Returns:
        (facts, whether versions are assumed as the profile's because its engine is not installed here)
    """
    software, assumed = sets.facts(profile.line)
    if profile.platform == NPU:
        role = role.for_version(software.get("vllm_ascend"))
    argv = open_command(role, str(checkpoint.directory if checkpoint else "DIR"), extra).argv
    if role.engine == SGLANG:
        assumed = version_of("sglang") is None
    facts = rule_facts.of_profile(profile, role)
    environ = {**os.environ, **role.env}
    facts |= rule_facts.of_command(argv, environ) | software
    facts["our_plugin"] = plugin_is_active(environ, ascend=profile.platform == "npu") and fixes_rotation()
    if checkpoint is not None:
        facts |= weights.facts(checkpoint)
    if not assumed:  # devices and limits of another machine do not describe the Atlas
        here = machine.facts()
        with suppress(InvalidVersion, KeyError):
            here["cann"] = Version(here.pop("cann"))
        facts |= here
    if role.engine == SGLANG:
        facts = {name: value for name, value in facts.items() if name in COMMON} | of_sglang_command(argv, environ)
    return facts, assumed


def fixes_rotation() -> bool:
    """True if our plugin knows where the installed vllm-ascend rotates the indexer; without vllm-ascend True."""
    folder = ascend_folder()
    return folder is None or indexer_rotation.is_known(folder)


def preflight(
    profile: Profile, checkpoint: CheckpointSummary | None, role: str | None = None, extra: list[str] | None = None
) -> list[Preflight]:
    """One result per role, or for the named one. extra: the user's flags, which override the profile's."""
    roles = list(profile.roles.values()) if role is None else [profile.role(role)]
    results = []
    for one in roles:
        facts, assumed = facts_for(profile, one, checkpoint, extra or [])
        broken, unchecked = judge(facts) if profile.platform == NPU else ([], {})
        results.append(Preflight(profile.name, one.name, broken, unchecked, assumed))
    return results
