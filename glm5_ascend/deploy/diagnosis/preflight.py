"""The rules over one profile, one checkpoint and this machine."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from glm5_ascend.checkpoint.summary import CheckpointSummary
from glm5_ascend.deploy.diagnosis import machine
from glm5_ascend.deploy.profiles.command import open_command
from glm5_ascend.deploy.profiles.load import Profile, Role
from glm5_ascend.deploy.rules import facts as rule_facts
from glm5_ascend.deploy.rules.load import BrokenRule, judge
from glm5_ascend.engine_lines import NPU, SGLANG
from glm5_ascend.serve import indexer_rotation
from glm5_ascend.serve import versions as sets
from glm5_ascend.serve.activation import ascend_folder, plugin_is_active
from glm5_ascend.serve.environment import version_of

MOUNTS = Path("/proc/mounts")


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
        facts |= checkpoint_facts(checkpoint)
    if not assumed:  # devices and limits of another machine do not describe the Atlas
        here = machine.facts()
        with suppress(InvalidVersion, KeyError):
            here["cann"] = Version(here.pop("cann"))
        facts |= here
    if role.engine == SGLANG:
        facts = {name: value for name, value in facts.items() if name in rule_facts.COMMON}
        facts |= rule_facts.of_sglang_command(argv, environ)
    return facts, assumed


def checkpoint_facts(checkpoint: CheckpointSummary) -> dict[str, Any]:
    """Facts from the JSON files of a checkpoint. Raises `CheckpointError` for an index that cannot be read."""
    directory, types, config = checkpoint.directory, checkpoint.types, checkpoint.config
    facts: dict[str, Any] = {
        "model": directory.resolve().name,
        "quantized": bool(types),
        "experts": checkpoint.experts,
        "attention": checkpoint.attention,
        "weights": rule_facts.short_name(checkpoint.experts),
        "linear_types": tuple(sorted({t for name, t in types.items() if ".mlp.experts." not in name})),
        "kv_b_quantized": any(t != "FLOAT" for name, t in types.items() if name.endswith(".kv_b_proj.weight")),
        "shared_indexers": checkpoint.shared_indexers,
        "mtp_layers": config.get("num_nextn_predict_layers") or 0,
    }
    if types:
        facts["group_size"] = checkpoint.group_size
    names, layers = tensor_names(directory), config.get("num_hidden_layers", 0)
    if names is not None:
        indexers = [f"model.layers.{i}.self_attn.indexer.wk.weight" for i in range(layers)]
        facts["layers_without_indexer"] = sum(name not in names for name in indexers)
        facts["mtp_tensors"] = sum(name.startswith(f"model.layers.{layers}.") for name in names)
    if MOUNTS.is_file():
        mounts = MOUNTS.read_text(encoding="utf-8")
        facts["network_mount"] = machine.on_network_mount(directory.resolve(), mounts)
    return facts


def tensor_names(directory: Path) -> set[str] | None:
    """Names of all tensors in the index that vLLM reads; None without one. Raises `CheckpointError` for a bad one."""
    from glm5_ascend.checkpoint.index import read_weight_map  # loads torch

    weight_map = read_weight_map(directory)
    return None if weight_map is None else set(weight_map)


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
