"""The rules over one profile, one checkpoint and this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from glm5_ascend.checkpoint.summary import CheckpointSummary
from glm5_ascend.checkpoint.types import DESCRIPTION_NAME
from glm5_ascend.deploy.profiles.command import open_command, user_flags
from glm5_ascend.deploy.profiles.load import Profile, Role
from glm5_ascend.deploy.rules import facts as rule_facts
from glm5_ascend.deploy.rules import machine
from glm5_ascend.deploy.rules.load import ERROR, Rule, judge
from glm5_ascend.engine_lines import NPU, SGLANG, EngineLine
from glm5_ascend.errors import ConfigError
from glm5_ascend.model.config import ModelConfig
from glm5_ascend.model.config_values import indexer_schedule
from glm5_ascend.serve import versions as sets
from glm5_ascend.serve.environment import plugin_is_active, with_users_variables
from glm5_ascend.serve.flag_table import FlagTable, installed_table

#: A model with fewer experts is one for tests, which stands for GLM-5: no layout of a profile would divide its sizes.
FEW_EXPERTS = 32


@dataclass(frozen=True)
class Preflight:
    """Result of the rules for one role.

    assumed: versions are those of `line`; its engine is not installed here.
    """

    role: str
    broken: list[Rule]
    unchecked: dict[str, list[str]]
    assumed: bool
    line: EngineLine


def facts_for(
    profile: Profile, role: Role, checkpoint: CheckpointSummary | None, extra: Sequence[str]
) -> tuple[dict[str, Any], bool]:
    """Collect facts from profile, command line, software, checkpoint and machine; later sources override earlier ones.

    Returns:
        (facts, whether versions are assumed because the engine is not installed here)
    """
    line, flags = user_flags(profile, extra)
    software, assumed = sets.facts(line)
    role = role.for_line(line)
    argv = open_command(role, str(checkpoint.directory if checkpoint else "DIR"), flags).argv
    environ = {**os.environ, **with_users_variables(role.env)[0]}
    sizes = None if checkpoint is None else sizes_of(checkpoint.model)
    facts = rule_facts.of_profile(profile, role) | rule_facts.of_command(argv, environ, line, sizes) | software
    if role.engine != SGLANG:
        facts["replaced_json"] = replaced_json(role, extra, installed_table(line))
    facts["our_plugin"] = plugin_is_active(environ)
    if checkpoint is not None:
        facts |= checkpoint_facts(checkpoint)
        partition = environ.get("VLLM_PP_LAYER_PARTITION", "")
        facts["stage_on_shared"] = stage_on_shared(checkpoint.model.indexer_types, facts["pp"], partition)
    elif facts["pp"] == 1:
        facts["stage_on_shared"] = 0
    if not assumed:  # devices and limits of another machine do not describe the Atlas
        here = machine.facts()
        with suppress(InvalidVersion, KeyError):
            here["cann"] = Version(here.pop("cann"))
        facts |= here
    if role.engine == SGLANG:
        facts = {name: value for name, value in facts.items() if name in rule_facts.COMMON}
        facts |= rule_facts.of_sglang_command(argv, environ)
    return facts, assumed


def sizes_of(model: ModelConfig) -> rule_facts.ModelSizes | None:
    """Sizes of a model; None, which is GLM-5's, for one with `FEW_EXPERTS`."""
    sizes = model.n_routed_experts, model.num_experts_per_tok, model.hidden_size, model.num_attention_heads
    return rule_facts.ModelSizes(*sizes) if model.n_routed_experts >= FEW_EXPERTS else None


def replaced_json(role: Role, extra: Sequence[str], table: FlagTable) -> str:
    """The user's flags with a dot that replace a whole JSON object of the profile, as vLLM does."""
    names = [word.partition("=")[0] for word in extra if word.startswith("-") and "." in word.partition("=")[0]]
    whole = {flag for flag, value in role.args.items() if isinstance(value, dict)}
    bases = {name: name.partition(".")[0].replace("_", "-") for name in names}
    return ", ".join(name for name, base in bases.items() if table.parse([base, "{}"]).keys() & whole)


def stage_on_shared(indexers: Sequence[str], stages: int, partition: str) -> int:
    """The first layer of a pipeline stage that reads the positions of an indexer on another stage; 0: none.

    Args:
        indexers: "full" or "shared" for each layer.
        partition: VLLM_PP_LAYER_PARTITION, layers per stage; empty: vLLM's equal parts.
    """
    base, rest = divmod(len(indexers), stages)
    sizes = [int(count) for count in partition.split(",") if count.strip().isdecimal()]
    if len(sizes) != stages:
        sizes = [base + (stages - 1 - rest <= stage < stages - 1) for stage in range(stages)]
    starts = list(accumulate(sizes))[:-1]
    return next((start for start in starts if indexers[start : start + 1] == ("shared",)), 0)


def checkpoint_facts(checkpoint: CheckpointSummary) -> dict[str, Any]:
    """Facts from the JSON files of a checkpoint. Raises `CheckpointError` for an index that cannot be read."""
    directory, types, model = checkpoint.directory, checkpoint.types, checkpoint.model
    layers = range(model.num_hidden_layers)
    shared = "shared" in (checkpoint.config.get("indexer_types") or ())
    facts: dict[str, Any] = {
        "model": directory.resolve().name, "quantized": bool(types), "experts": checkpoint.experts,
        "attention": checkpoint.attention, "weights": rule_facts.short_name(checkpoint.experts),
        "linear_types": tuple(sorted({t for name, t in types.items() if ".mlp.experts." not in name})),
        "kv_b_quantized": any(t != "FLOAT" for name, t in types.items() if name.endswith(".kv_b_proj.weight")),
        "mtp_layers": model.num_nextn_predict_layers, **({"group_size": checkpoint.group_size} if types else {}),
        "shared_indexers": shared and not all(indexer_schedule(checkpoint.config, len(layers))),
        "linear_attention": "linear" in model.attention_types,
        "network_mount": machine.on_network_mount(directory.resolve()),
    }  # fmt: skip
    from glm5_ascend.checkpoint.index import read_weight_map  # loads torch

    if (names := read_weight_map(directory)) is not None:
        prefixes = [model.spec.layer_prefix(i) for i in layers if model.attention_kind(i) == "sparse"]
        indexers = (f"{prefix}{model.spec.indexer}.wk.weight" for prefix in prefixes)
        facts["layers_without_indexer"] = sum(name not in names for name in indexers)
        facts["mtp_tensors"] = sum(name.startswith(model.mtp_prefixes) for name in names)
    return facts


def quick_check(directory: Path, engine: str | None) -> list[str]:
    """Return the errors of `verify` in the headers of a quantized checkpoint, for one engine or for all."""
    if not (directory / DESCRIPTION_NAME).is_file():
        return []
    from glm5_ascend.verify import verify  # loads torch

    report = verify(directory, engine=engine, deep=False)
    return [] if report.ok else report.lines(quiet=True)


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


def print_broken(broken: Collection[Rule]) -> str:
    """Print broken rules to stderr; returns the ids of those that are errors."""
    for rule in broken:
        print(f"{rule.level} {rule.id}: {rule.message} ({rule.known_from})\n  fix: {rule.fix}", file=sys.stderr)
    return ", ".join(rule.id for rule in broken if rule.level == ERROR)


def preflight(
    profile: Profile, checkpoint: CheckpointSummary | None, role: str | None = None, extra: Sequence[str] = ()
) -> list[Preflight]:
    """One result per role, or for the named one. extra: the user's flags, which override the profile's.

    Raises:
        ConfigError: the engine would refuse one of these flags.
    """
    line, results = user_flags(profile, extra)[0], []
    for judged in profile.roles.values() if role is None else [profile.role(role)]:
        facts, assumed = facts_for(profile, judged, checkpoint, extra)
        broken, unchecked = judge(facts) if profile.platform == NPU else ([], {})
        results.append(Preflight(judged.name, broken, unchecked, assumed, line))
    return results
