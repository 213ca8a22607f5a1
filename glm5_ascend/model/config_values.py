"""The values of config.json: `ModelConfig` from its keys, each checked once.

Source of the keys: transformers 5.19 `GlmMoeDsaConfig`, vLLM 0.32 `deepseek_v2.py`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from glm5_ascend.errors import ConfigError, shown
from glm5_ascend.model.config import ModelConfig
from glm5_ascend.model.spec import Architecture

#: Sizes are multiplied, and given to engines as 32-bit integers.
LARGEST_SIZE = 2**31 - 1
#: A damaged number must not become an endless loop. GLM-5 has 78 layers.
LARGEST_LAYERS = 1000
#: Optional keys that are read, and the JSON type each must have.
_OPTIONAL: dict[str, type] = {
    "mlp_layer_types": list, "indexer_types": list, "index_topk_pattern": str, "first_k_dense_replace": int,
    "index_topk_freq": int, "index_skip_topk_offset": int, "rope_parameters": dict, "quantization_config": dict,
    "text_config": dict,
}  # fmt: skip
#: Largest counts: a damaged number must not become an endless loop. GLM-5 has 78, 1 and 256.
_LARGEST_COUNT = {"num_hidden_layers": LARGEST_LAYERS, "num_nextn_predict_layers": 100, "n_routed_experts": 10_000}
#: Sizes that are multiplied, and given to engines as 32-bit integers. GLM-5's largest is its context, 202752.
_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_attention_heads",
    "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
    "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "n_group", "topk_group",
    "index_n_heads", "index_head_dim", "index_topk", "max_position_embeddings",
)  # fmt: skip
_PER_LAYER = ("mlp_layer_types", "indexer_types", "index_topk_pattern")
#: Keys of the schedule of indexers, which readers compute with: null is no default.
_SCHEDULE = ("index_topk_freq", "index_skip_topk_offset")


def checked_config(raw: dict[str, Any], spec: Architecture, path: Path) -> ModelConfig:
    """The sizes and switches of a model from the keys of its language model, each checked.

    Raises:
        ConfigError: a missing or impossible value, by its key.
    """
    read = KeyReader(raw, path)
    check_counts(raw, spec, path)
    layers = read.positive("num_hidden_layers")
    fixed: dict[str, Any] = {key: value for key, value in spec.fixed_keys.items() if key in _SIZES}
    more: dict[str, Any] = {key: read.number(key, signed=True) for key in spec.more_numbers}
    config = ModelConfig(
        path=path,
        model_type=raw["model_type"],
        num_hidden_layers=layers,
        num_nextn_predict_layers=raw.get("num_nextn_predict_layers", 0),
        rms_norm_eps=read.number("rms_norm_eps"),
        rope_theta=_rope_theta(raw, path) if fixed.get("qk_rope_head_dim") != 0 else 1.0,
        norm_topk_prob=bool(read.value("norm_topk_prob")),
        routed_scaling_factor=read.number("routed_scaling_factor"),
        mlp_layer_types=_mlp_layer_types(raw, layers, path),
        indexer_types=_indexer_types(raw, layers, path),
        quantization_config=raw.get("quantization_config"),
        attention_types=_attention_types(raw, spec, layers, path),
        vision=_vision_sizes(raw, spec, path),
        **{key: read.positive(key) for key in (*_SIZES, *spec.more_sizes) if key not in fixed},
        **more,
        **fixed,
    )
    _check_fixed_keys(raw, config)
    _check_sizes(config)
    return config


def check_counts(raw: dict[str, Any], spec: Architecture | None, path: Path) -> None:
    """Check bounds and types of the counts and sizes that are given; a missing key is accepted.

    Raises:
        ConfigError: one line with the key.
    """
    for key, largest in _LARGEST_COUNT.items():
        value = raw.get(key, 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < (key == "num_hidden_layers"):
            raise ConfigError(f"{path}: {key} is {shown(value)}, expected an integer > 0", "correct config.json")
        if value > largest:
            raise ConfigError(
                f"{path}: {key} is {shown(value)}, at most {largest} are supported", "correct config.json"
            )
    for key, type_ in _OPTIONAL.items():
        value = raw.get(key)
        if value is not None and (not isinstance(value, type_) or isinstance(value, bool)):
            raise ConfigError(f"{path}: {key} is {shown(value)}, expected {type_.__name__}", "correct config.json")
    read = KeyReader(raw, path)
    for key in _SIZES:
        if key in raw and (spec is None or key not in spec.fixed_keys):
            read.positive(key)
    for key in _PER_LAYER:
        types, layers = raw.get(key), raw.get("num_hidden_layers")
        if types is not None and layers is not None and len(types) != layers:
            raise ConfigError(f"{path}: {key} has {len(types)} entries for {layers} layers", "correct config.json")
    for key in _SCHEDULE if raw.get("index_topk_pattern") is None else ():
        if key in raw and (raw[key] is None or (key == "index_topk_freq" and raw[key] < 1)):
            value, expected = raw[key], "an integer > 0" if key == "index_topk_freq" else "an integer"
            stands = "null" if value is None else shown(value)
            raise ConfigError(f"{path}: {key} is {stands}, expected {expected}", "correct or remove the key")


def _rope_theta(raw: dict[str, Any], path: Path) -> float:
    rope = raw.get("rope_parameters") or {}
    rope_type = rope.get("rope_type", "default")
    theta = rope.get("rope_theta", raw.get("rope_theta"))
    if rope_type != "default":
        yarn = ": YaRN stretches the context of other models, GLM-5 has 200k or 1M without it"
        message = f"{path}: rope_type {shown(rope_type)} is not supported, GLM-5 uses 'default'"
        raise ConfigError(message + yarn * (rope_type == "yarn"), "use the config.json of the original checkpoint")
    if isinstance(theta, bool) or not isinstance(theta, int | float) or not 0 < theta < math.inf:
        # A wrong theta gives fluent text from the wrong model, so there is no default.
        raise ConfigError(
            f"{path}: rope_parameters.rope_theta is {shown(theta)}", "use the config.json of the original checkpoint"
        )
    return float(theta)


def _check_fixed_keys(raw: dict[str, Any], config: ModelConfig) -> None:
    for key, expected in config.spec.fixed_keys.items():
        if raw.get(key, expected) != expected:
            raise ConfigError(
                f"{config.path}: {key} is {shown(raw[key])}, {config.spec.label} has {expected!r}",
                f"give a {config.spec.label} checkpoint",
            )


def _check_sizes(config: ModelConfig) -> None:
    if config.num_experts_per_tok > config.n_routed_experts:
        raise ConfigError(
            f"{config.path}: num_experts_per_tok {config.num_experts_per_tok} exceeds n_routed_experts "
            f"{config.n_routed_experts}",
            "correct config.json",
        )
    if config.n_routed_experts % config.n_group or config.topk_group > config.n_group:
        groups = f"n_group {config.n_group} / topk_group {config.topk_group}"
        raise ConfigError(f"{config.path}: {groups} do not fit", "correct config.json")
    if "shared" in config.indexer_types and not config.spec.shared_indexers:
        raise ConfigError(
            f"{config.path}: indexer_types has 'shared', but every sparse layer of {config.spec.label} has an indexer",
            "correct config.json",
        )
    if config.index_topk % config.index_kpool:
        raise ConfigError(
            f"{config.path}: index_topk {config.index_topk} is no multiple of index_kpool {config.index_kpool}",
            "correct config.json",
        )
    if config.qk_rope_head_dim % 2 or config.index_head_dim < config.qk_rope_head_dim:
        raise ConfigError(f"{config.path}: qk_rope_head_dim does not fit", "correct config.json")


def _mlp_layer_types(raw: dict[str, Any], layers: int, path: Path) -> tuple[str, ...]:
    dense = raw.get("first_k_dense_replace")
    types = raw.get("mlp_layer_types")
    if types is None:
        if not isinstance(dense, int) or dense < 0:
            raise ConfigError(
                f"{path}: neither mlp_layer_types nor a first_k_dense_replace >= 0 is given", "correct config.json"
            )
        types = ["dense"] * min(dense, layers) + ["sparse"] * (layers - min(dense, layers))
    if any(mlp_type not in ("dense", "sparse") for mlp_type in types):
        raise ConfigError(f"{path}: mlp_layer_types must be 'dense' or 'sparse' for each layer", "correct config.json")
    # Bounded by the layers first: a list of `dense` entries could be of any length.
    if dense is not None and (
        not 0 <= dense <= layers or list(types) != ["dense"] * dense + ["sparse"] * (layers - dense)
    ):
        raise ConfigError(
            f"{path}: mlp_layer_types and first_k_dense_replace {dense} disagree",
            "the engine reads the latter: correct one",
        )
    return tuple(types)


def indexer_schedule(raw: dict[str, Any], layers: int) -> list[bool]:
    """Return for each main layer if it computes its own top-k; vLLM reads these keys, not `indexer_types`."""
    pattern = raw.get("index_topk_pattern")
    if pattern is not None:
        return [i >= len(pattern) or pattern[i] != "S" for i in range(layers)]
    freq, offset = max(raw.get("index_topk_freq") or 1, 1), raw.get("index_skip_topk_offset")
    offset = 2 if offset is None else offset  # the default in vLLM and transformers; GLM-5.2 has 3
    return [max(i - offset + 1, 0) % freq == 0 for i in range(layers)]


def schedule_keys(raw: dict[str, Any]) -> str:
    """The keys that `indexer_schedule` computes with, as they stand in config.json: "index_topk_freq 4 and ..."."""
    keys = ("index_topk_pattern",) if raw.get("index_topk_pattern") is not None else _SCHEDULE
    return " and ".join(f"{key} {shown(raw[key])}" for key in keys if raw.get(key) is not None)


def _indexer_types(raw: dict[str, Any], layers: int, path: Path) -> tuple[str, ...]:
    """Return 'full' or 'shared' per main layer; a shared one uses the positions of an earlier layer's indexer."""
    types, pattern = raw.get("indexer_types"), raw.get("index_topk_pattern")
    if pattern is not None and set(pattern) - set("FS"):
        raise ConfigError(
            f"{path}: index_topk_pattern is {shown(pattern)}: only the letters F (own indexer) and S (shared) count",
            "use the config.json of the original checkpoint",
        )
    computes = indexer_schedule(raw, layers)
    if not computes[0]:
        raise ConfigError(
            f"{path}: {schedule_keys(raw)}: the first layer would share an earlier indexer, and there is none",
            "use the config.json of the original checkpoint (GLM-5.2 has index_skip_topk_offset 3)",
        )
    if types is None:
        types = ["full" if computed else "shared" for computed in computes]
    if any(indexer_type not in ("full", "shared") for indexer_type in types):
        raise ConfigError(f"{path}: indexer_types must be 'full' or 'shared' for each layer", "correct config.json")
    if types[0] == "shared":
        message = f"{path}: indexer_types[0] is 'shared': the first layer has nothing to share"
        raise ConfigError(message, "correct config.json")
    return tuple(types)


def _attention_types(raw: dict[str, Any], spec: Architecture, layers: int, path: Path) -> tuple[str, ...]:
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
    return tuple(kinds[attention] for attention in types)


def _vision_sizes(raw: dict[str, Any], spec: Architecture, path: Path) -> tuple[tuple[str, int], ...]:
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
