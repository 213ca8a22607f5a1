"""Keys of config.json: where an architecture keeps them, what a missing one means, and readers that check them.

GLM-5.3-Flash keeps the language model's keys in `text_config` and the vision tower's in `vision_config`; transformers
leaves out keys that have its defaults.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glm5_ascend.errors import ConfigError, shown
from glm5_ascend.model.config import SPECS
from glm5_ascend.model.spec import ModelSpec

#: A damaged number must not become an endless loop. GLM-5 has 78 layers.
LARGEST_LAYERS = 1000
#: Sizes are multiplied, and given to engines as 32-bit integers.
LARGEST_SIZE = 2**31 - 1


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
    for part, defaults in ((spec.text_config, spec.defaults), (spec.vision_config, spec.vision_defaults)):
        inner = full.get(part)
        keys = language if part == spec.text_config else inner
        if isinstance(inner, dict) and isinstance(keys, dict):
            missing = {key: value for key, value in defaults.items() if key not in keys}
            full[part] = inner | missing if missing else inner
    return full


def spec_of(raw: Mapping[str, Any]) -> ModelSpec | None:
    """Return the architecture of a config.json; None if it is not supported."""
    model_type = raw.get("model_type")
    return SPECS.get(model_type) if isinstance(model_type, str) else None


def check_parts(raw: Mapping[str, Any], spec: ModelSpec, path: Path) -> None:
    """Raise `ConfigError` where config.json lacks an object of the architecture, or has that of another one."""
    for key, part in ((spec.text_config, "text"), (spec.vision_config, "vision")):
        if key is None:
            continue
        fix = "use the config.json of the original checkpoint"
        inner, model_type = raw.get(key), f"{spec.model_type}_{part}"
        if not isinstance(inner, dict):
            raise ConfigError(f"{path}: {key} is {shown(inner)}, expected an object: {spec.label} has one", fix)
        if inner.get("model_type", model_type) != model_type:
            raise ConfigError(f"{path}: {key}.model_type is {shown(inner['model_type'])}, expected {model_type!r}", fix)


def attention_types(raw: dict[str, Any], spec: ModelSpec, layers: int, path: Path) -> tuple[str, ...]:
    """Return "linear" or "sparse" per main layer; empty for an architecture with one kind of attention."""
    if not spec.attention_kinds:
        return ()
    types = raw.get("layer_types")
    kinds = spec.attention_kinds
    if not isinstance(types, list) or len(types) != layers or not all(isinstance(t, str) and t in kinds for t in types):
        stated = f"has {len(types)} entries" if isinstance(types, list) else f"is {shown(types)}"
        raise ConfigError(
            f"{path}: layer_types {stated}, expected {layers} times one of {', '.join(kinds)}",
            "use the config.json of the original checkpoint",
        )
    return tuple(kinds[kind] for kind in types)


def vision_sizes(raw: dict[str, Any], spec: ModelSpec, path: Path) -> tuple[tuple[str, int], ...]:
    """Return the integers of `vision_config` that the tower's shapes follow from."""
    if spec.vision_config is None:
        return ()
    read = KeyReader(raw[spec.vision_config], path)
    keys = [key for key, value in spec.vision_defaults.items() if type(value) is int]
    sizes = {key: read.positive(key) for key in keys}
    if sizes["depth"] > LARGEST_LAYERS or sizes["hidden_size"] % sizes["num_heads"]:
        raise ConfigError(
            f"{path}: vision_config: depth {sizes['depth']}, hidden_size {sizes['hidden_size']}, num_heads "
            f"{sizes['num_heads']} do not fit",
            "correct config.json",
        )
    if sizes["out_hidden_size"] != raw.get("hidden_size"):
        raise ConfigError(
            f"{path}: vision_config.out_hidden_size is {sizes['out_hidden_size']}, hidden_size is "
            f"{shown(raw.get('hidden_size'))}: images could not be put among the text",
            "correct config.json",
        )
    return tuple(sizes.items())


class KeyReader:
    """Reads keys of a JSON object, each checked; errors name `path` and the key."""

    def __init__(self, raw: dict[str, Any], path: Path) -> None:
        self.raw, self.path = raw, path

    def value(self, key: str) -> Any:
        """Return any value; a missing key is an error."""
        if key not in self.raw:
            raise ConfigError(f"{self.path}: key {key!r} is missing", "use the config.json of the original checkpoint")
        return self.raw[key]

    def number(self, key: str, signed: bool = False) -> float:
        """Return a finite number, above zero unless `signed`."""
        value, least = self.value(key), -math.inf if signed else 0
        if isinstance(value, bool) or not isinstance(value, int | float) or not least < value < math.inf:
            expected = "a number" if signed else "a number > 0"
            raise ConfigError(f"{self.path}: {key} is {shown(value)}, expected {expected}", "correct config.json")
        return float(value)

    def positive(self, key: str) -> int:
        """Return an integer from 1 to `LARGEST_SIZE`."""
        value = self.value(key)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ConfigError(f"{self.path}: {key} is {shown(value)}, expected an integer > 0", "correct config.json")
        if value > LARGEST_SIZE:
            raise ConfigError(f"{self.path}: {key} is {shown(value)}, at most {LARGEST_SIZE}", "correct config.json")
        return value

    def count(self, key: str) -> int:
        """Return an integer from 0; a missing key is 0."""
        value = self.raw.get(key, 0)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(f"{self.path}: {key} is {shown(value)}, expected an integer >= 0", "correct config.json")
        return value
