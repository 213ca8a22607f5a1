"""Where config.json has its keys: which architecture it is of, and what a missing key means.

GLM-5.3-Flash keeps the language model's keys in `text_config` and the vision tower's in `vision_config`; transformers
leaves out keys that have its defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glm5_ascend.errors import ConfigError, shown
from glm5_ascend.model.config import SPECS
from glm5_ascend.model.config_values import schedule_keys
from glm5_ascend.model.spec import Architecture

#: Architectures users confuse with GLM-5, and what to tell them.
_OTHER_ARCHITECTURES = {
    "glm4_moe": "GLM-4.5/4.6/4.7 has no sparse attention",
    "glm4_moe_lite": "GLM-4.7-Flash has no sparse attention",
    "deepseek_v3": "DeepSeek-V3 has no sparse attention",
    "deepseek_v32": "DeepSeek-V3.2 rotates RoPE halves, GLM-5 interleaves",
    "glm_moe_dsa_mtp": "the MTP layer alone, exported as a draft model",
}
#: What to do about them, where it is more than to give another model.
_WAY_OUT = {
    "deepseek_v32": "is it a GLM-5 whose config.json was patched for an engine without glm_moe_dsa? Then restore the "
    "original config.json",
    "glm_moe_dsa_mtp": "give the whole model: its last layer is the MTP layer, and engines take the draft from it",
}


def language_keys(raw: dict[str, Any], path: Path) -> tuple[Architecture, dict[str, Any]]:
    """The architecture of a config.json and the keys of its language model, with the defaults of those left out.

    Raises:
        ConfigError: another architecture, or an object of it is missing.
    """
    spec = _check_architecture(raw, path)
    _check_objects(raw, spec, path)
    return spec, flat_keys(completed(raw))


def _check_architecture(raw: dict[str, Any], path: Path) -> Architecture:
    """The architecture of a config.json; `ConfigError` for another one names those that are confused with GLM-5."""
    model_type = raw.get("model_type")
    if isinstance(model_type, str) and model_type in SPECS:
        return SPECS[model_type]
    why = _OTHER_ARCHITECTURES.get(
        model_type if isinstance(model_type, str) else "", "only GLM-5, 5.1, 5.2 and 5.3 have it"
    )
    expected = " or ".join(map(repr, SPECS))
    tip = _WAY_OUT.get(model_type if isinstance(model_type, str) else "", "give a GLM-5 checkpoint")
    raise ConfigError(f"{path}: model_type is {shown(model_type)}, expected {expected} ({why})", tip)


def flat_keys(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of the language model, wherever config.json has them; `model_type` is that of the whole file.

    For a spec with a `text_config` its keys stand beside the outer ones, and those of the spec's groups by themselves.
    """
    spec = spec_of(raw)
    if spec is None or spec.text_config is None:
        return dict(raw)
    inner = raw.get(spec.text_config)
    keys = {**raw, **(inner if isinstance(inner, dict) else {}), "model_type": raw["model_type"]}
    keys = {key: value for key, value in keys.items() if key != spec.text_config}
    if "architectures" in raw:
        keys["architectures"] = raw["architectures"]
    for group, names in spec.groups.items():
        if isinstance(group_keys := keys.get(group), dict):
            keys |= {outside: group_keys[inside] for inside, outside in names.items() if inside in group_keys}
    return keys


def completed(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with the defaults of its spec where it leaves keys out; transformers saves what differs only.

    The language model's go into `text_config`, the tower's into `vision_config`.
    """
    spec = spec_of(raw)
    if spec is None or spec.text_config is None or spec.vision_config is None:
        return dict(raw)
    full = dict(raw)
    language = flat_keys(raw)
    for outer, defaults in ((spec.text_config, spec.defaults), (spec.vision_config, spec.vision_defaults)):
        inner = full.get(outer)
        keys = language if outer == spec.text_config else inner
        if isinstance(inner, dict) and isinstance(keys, dict):
            missing = {key: value for key, value in defaults.items() if key not in keys}
            full[outer] = inner | missing if missing else inner
    return full


def served_config(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a source's config.json without its quantization: with it vLLM would not open the description.

    Keys that it leaves out because they have transformers' default are stated: other engines have other defaults.
    Shared indexers that only `indexer_types` names, which transformers reads, are stated in vLLM's key as well.
    """
    keys = ("quantization_config", "compression_config")
    config = {key: value for key, value in completed(raw).items() if key not in keys}
    if isinstance(inner := config.get("text_config"), dict):
        config["text_config"] = {key: value for key, value in inner.items() if key not in keys}
    types = config.get("indexer_types")
    if isinstance(types, list) and "shared" in types and not schedule_keys(config):
        config["index_topk_pattern"] = "".join("S" if indexer == "shared" else "F" for indexer in types)
    return config


def spec_of(raw: Mapping[str, Any]) -> Architecture | None:
    """Return the architecture of a config.json; None if it is not supported."""
    model_type = raw.get("model_type")
    return SPECS.get(model_type) if isinstance(model_type, str) else None


def _check_objects(raw: Mapping[str, Any], spec: Architecture, path: Path) -> None:
    """Raise `ConfigError` where config.json lacks an object of the architecture, or has that of another one."""
    for key, suffix in ((spec.text_config, "text"), (spec.vision_config, "vision")):
        if key is None:
            continue
        fix = "use the config.json of the original checkpoint"
        inner, model_type = raw.get(key), f"{spec.model_type}_{suffix}"
        if not isinstance(inner, dict):
            raise ConfigError(f"{path}: {key} is {shown(inner)}, expected an object: {spec.label} has one", fix)
        if inner.get("model_type", model_type) != model_type:
            raise ConfigError(f"{path}: {key}.model_type is {shown(inner['model_type'])}, expected {model_type!r}", fix)
