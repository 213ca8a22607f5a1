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
from glm5_ascend.engine_lines import SGLANG
from glm5_ascend.serve import indexer_rotation
from glm5_ascend.serve import versions as sets
from glm5_ascend.serve.activation import ascend_folder, plugin_is_active
from glm5_ascend.serve.environment import version_of


@dataclass(frozen=True)
class Preflight:
    """What the rules found for one role. assumed: versions are the profile's, because its engine is not here."""

    profile: str
    role: str
    broken: list[BrokenRule]
    unchecked: dict[str, list[str]]
    assumed: bool


def facts_for(
    profile: Profile, role: Role, checkpoint: CheckpointSummary | None, extra: list[str]
) -> tuple[dict[str, Any], bool]:
    """Everything known, later sources winning: profile, command line, software, checkpoint, machine.

    Returns:
        (facts, whether versions are assumed as the profile's because its engine is not here)
    """
    software, assumed = sets.facts(profile.line)
    if profile.platform == "npu":
        role = role.for_version(software.get("vllm_ascend"))
    argv = open_command(role, str(checkpoint.directory if checkpoint else "DIR"), extra).argv
    if role.engine == SGLANG:
        assumed = version_of("sglang") is None
    known = rule_facts.of_profile(profile, role)
    environ = {**os.environ, **role.env}
    known |= rule_facts.of_command(argv, environ) | software
    known["our_plugin"] = plugin_is_active(environ, ascend=profile.platform == "npu") and mends_rotation()
    if checkpoint is not None:
        known |= weights.facts(checkpoint)
    if not assumed:  # elsewhere the machine's devices and limits say nothing about the Atlas
        here = machine.facts()
        with suppress(InvalidVersion, KeyError):
            here["cann"] = Version(here.pop("cann"))
        known |= here
    if role.engine == SGLANG:
        known = {name: value for name, value in known.items() if name in COMMON} | of_sglang_command(argv, environ)
    return known, assumed


def mends_rotation() -> bool:
    """Whether our plugin finds what it mends in the vllm-ascend that is installed; elsewhere the tested ones count."""
    folder = ascend_folder()
    return folder is None or indexer_rotation.is_known(folder)


def preflight(
    profile: Profile, checkpoint: CheckpointSummary | None, role: str | None = None, extra: list[str] | None = None
) -> list[Preflight]:
    """One result per role; of all roles if none is named. extra: the user's vLLM flags, which win."""
    wanted = list(profile.roles.values()) if role is None else [profile.role(role)]
    results = []
    for each in wanted:
        known, assumed = facts_for(profile, each, checkpoint, extra or [])
        broken, unchecked = judge(known) if profile.platform == "npu" else ([], {})
        results.append(Preflight(profile.name, each.name, broken, unchecked, assumed))
    return results
