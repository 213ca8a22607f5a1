"""The values of config.json: `ModelConfig` from its keys, each checked once.

Source of the keys: transformers 5.19 `GlmMoeDsaConfig`, vLLM 0.32 `deepseek_v2.py`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from glm5_ascend.errors import ConfigError, shown
from glm5_ascend.model.config import ModelConfig
from glm5_ascend.model.spec import Architecture

#: Sizes are multiplied, and given to engines as 32-bit integers.
_Size = Annotated[int, Field(strict=True, gt=0, le=2**31 - 1)]
#: A damaged number must not become an endless loop. GLM-5 has 78 layers.
_LARGEST_LAYERS = 1000
_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_attention_heads",
    "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
    "n_shared_experts", "num_experts_per_tok", "n_group", "topk_group",
    "index_n_heads", "index_head_dim", "index_topk", "max_position_embeddings",
)  # fmt: skip
_PER_LAYER = ("mlp_layer_types", "indexer_types", "index_topk_pattern")
#: Keys of the schedule of indexers, which readers compute with: null is no default.
_SCHEDULE = ("index_topk_freq", "index_skip_topk_offset")
_ORIGINAL = "use the config.json of the original checkpoint"
_CORRECT = "correct config.json"


class _Keys(BaseModel):
    """Keys that are no plain sizes; those with a default may be absent."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    num_hidden_layers: Annotated[int, Field(gt=0, le=_LARGEST_LAYERS)]
    num_nextn_predict_layers: Annotated[int, Field(ge=0, le=100)] = 0
    n_routed_experts: Annotated[int, Field(gt=0, le=10_000)]
    norm_topk_prob: bool
    rms_norm_eps: Annotated[float, Field(gt=0)]
    routed_scaling_factor: Annotated[float, Field(gt=0)]
    first_k_dense_replace: Annotated[int, Field(ge=0)] | None = None
    mlp_layer_types: list[Literal["dense", "sparse"]] | None = None
    indexer_types: list[Literal["full", "shared"]] | None = None
    index_topk_pattern: Annotated[str, Field(pattern="^[FS]*$")] | None = None  # own indexer, shared
    index_topk_freq: Annotated[int, Field(gt=0)] = 1
    index_skip_topk_offset: int = 2
    rope_parameters: dict[str, Any] | None = None
    quantization_config: dict[str, Any] | None = None
    text_config: dict[str, Any] | None = None


_SIZES_TYPE: TypeAdapter[dict[str, int]] = TypeAdapter(dict[str, _Size])
_NUMBERS_TYPE: TypeAdapter[dict[str, float]] = TypeAdapter(
    dict[str, float], config=ConfigDict(strict=True, allow_inf_nan=False)
)


def checked_config(raw: dict[str, Any], spec: Architecture, path: Path) -> ModelConfig:
    """The sizes and switches of a model from the keys of its language model; ConfigError names a bad one."""
    fixed: dict[str, Any] = {key: value for key, value in spec.fixed_keys.items() if key in _SIZES}
    sizes = [key for key in (*_SIZES, *spec.more_sizes) if key not in fixed]
    stated = {key: raw[key] for key in raw if key not in _SCHEDULE or raw.get("index_topk_pattern") is None}
    try:
        keys = _Keys.model_validate(stated)
        more: dict[str, Any] = dict(_SIZES_TYPE.validate_python({key: raw.get(key) for key in sizes}))
        more |= _NUMBERS_TYPE.validate_python({key: raw.get(key) for key in spec.more_numbers})
    except ValidationError as error:
        raise _refused(error, raw, path) from None
    layers = keys.num_hidden_layers
    for key in _PER_LAYER:
        types = raw.get(key)
        if types is not None and len(types) != layers:
            raise ConfigError(f"{path}: {key} has {len(types)} entries for {layers} layers", _CORRECT)
    config = ModelConfig(
        path=path,
        model_type=raw["model_type"],
        num_hidden_layers=layers,
        num_nextn_predict_layers=keys.num_nextn_predict_layers,
        n_routed_experts=keys.n_routed_experts,
        rms_norm_eps=keys.rms_norm_eps,
        rope_theta=_rope_theta(raw, path) if fixed.get("qk_rope_head_dim") != 0 else 1.0,
        norm_topk_prob=keys.norm_topk_prob,
        routed_scaling_factor=keys.routed_scaling_factor,
        mlp_layer_types=_mlp_layer_types(keys, path),
        indexer_types=_indexer_types(raw, keys, path),
        quantization_config=keys.quantization_config,
        attention_types=_attention_types(raw, spec, layers, path),
        vision=_vision_sizes(raw, spec, path),
        **more,
        **fixed,
    )
    _check_fixed_keys(raw, config)
    _check_sizes(config)
    return config


def _refused(error: ValidationError, raw: dict[str, Any], path: Path, prefix: str = "") -> ConfigError:
    """One line about the first key that pydantic refused."""
    problem = error.errors()[0]
    key = str(problem["loc"][0])
    stands = "is missing" if key not in raw else "is null" if raw[key] is None else f"is {shown(raw[key])}"
    return ConfigError(f"{path}: {prefix}{key} {stands}: {problem['msg']}", _ORIGINAL)


def _rope_theta(raw: dict[str, Any], path: Path) -> float:
    rope = raw.get("rope_parameters") or {}
    rope_type = rope.get("rope_type", "default")
    theta = rope.get("rope_theta", raw.get("rope_theta"))
    if rope_type != "default":
        yarn = ": YaRN stretches the context of other models, GLM-5 has 200k or 1M without it"
        message = f"{path}: rope_type {shown(rope_type)} is not supported, GLM-5 uses 'default'"
        raise ConfigError(message + yarn * (rope_type == "yarn"), _ORIGINAL)
    if isinstance(theta, bool) or not isinstance(theta, int | float) or not 0 < theta < math.inf:
        # A wrong theta gives fluent text from the wrong model, so there is no default.
        raise ConfigError(f"{path}: rope_parameters.rope_theta is {shown(theta)}", _ORIGINAL)
    return float(theta)


def _check_fixed_keys(raw: dict[str, Any], config: ModelConfig) -> None:
    for key, expected in config.spec.fixed_keys.items():
        if raw.get(key, expected) != expected:
            raise ConfigError(
                f"{config.path}: {key} is {shown(raw[key])}, {config.spec.label} has {expected!r}",
                f"give a {config.spec.label} checkpoint",
            )


def _check_sizes(c: ModelConfig) -> None:
    groups = c.n_routed_experts % c.n_group == 0 and c.topk_group <= c.n_group
    rope = c.qk_rope_head_dim % 2 == 0 and c.qk_rope_head_dim <= c.index_head_dim
    for fits, problem in (
        (
            c.num_experts_per_tok <= c.n_routed_experts,
            f"num_experts_per_tok {c.num_experts_per_tok} exceeds n_routed_experts {c.n_routed_experts}",
        ),
        (groups, f"n_group {c.n_group} / topk_group {c.topk_group} do not fit"),
        (
            c.spec.shared_indexers or "shared" not in c.indexer_types,
            f"indexer_types has 'shared', but every sparse layer of {c.spec.label} has an indexer",
        ),
        (
            c.index_topk % c.index_kpool == 0,
            f"index_topk {c.index_topk} is no multiple of index_kpool {c.index_kpool}",
        ),
        (rope, "qk_rope_head_dim does not fit"),
    ):
        if not fits:
            raise ConfigError(f"{c.path}: {problem}", _CORRECT)


def _mlp_layer_types(keys: _Keys, path: Path) -> tuple[str, ...]:
    layers, dense, types = keys.num_hidden_layers, keys.first_k_dense_replace, keys.mlp_layer_types
    if dense is None:
        if types is None:
            raise ConfigError(f"{path}: neither mlp_layer_types nor first_k_dense_replace is given", _CORRECT)
        return tuple(types)
    # Bounded by the layers: a list of `dense` entries could be of any length.
    leading = ("dense",) * min(dense, layers) + ("sparse",) * (layers - min(dense, layers))
    if dense > layers or (types is not None and tuple(types) != leading):
        raise ConfigError(
            f"{path}: mlp_layer_types and first_k_dense_replace {dense} disagree",
            "the engine reads the latter: correct one",
        )
    return leading


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


def _indexer_types(raw: dict[str, Any], keys: _Keys, path: Path) -> tuple[str, ...]:
    """Return 'full' or 'shared' per main layer; a shared one uses the positions of an earlier layer's indexer."""
    computes = indexer_schedule(raw, keys.num_hidden_layers)
    if not computes[0]:
        raise ConfigError(
            f"{path}: {schedule_keys(raw)}: the first layer would share an earlier indexer, and there is none",
            f"{_ORIGINAL} (GLM-5.2 has index_skip_topk_offset 3)",
        )
    if keys.indexer_types is None:
        return tuple("full" if computed else "shared" for computed in computes)
    if keys.indexer_types[0] == "shared":
        raise ConfigError(f"{path}: indexer_types[0] is 'shared': the first layer has nothing to share", _CORRECT)
    return tuple(keys.indexer_types)


def _attention_types(raw: dict[str, Any], spec: Architecture, layers: int, path: Path) -> tuple[str, ...]:
    """Return "linear" or "sparse" per main layer; empty for an architecture with one kind of attention."""
    if not spec.attention_kinds:
        return ()
    types, kinds = raw.get("layer_types"), spec.attention_kinds
    if not isinstance(types, list) or len(types) != layers or not all(isinstance(t, str) and t in kinds for t in types):
        stated = f"has {len(types)} entries" if isinstance(types, list) else f"is {shown(types)}"
        raise ConfigError(f"{path}: layer_types {stated}, expected {layers} times one of {', '.join(kinds)}", _ORIGINAL)
    return tuple(kinds[attention] for attention in types)


def _vision_sizes(raw: dict[str, Any], spec: Architecture, path: Path) -> tuple[tuple[str, int], ...]:
    if spec.vision_config is None:
        return ()
    vision = raw[spec.vision_config]
    keys = [key for key, value in spec.vision_defaults.items() if type(value) is int]
    try:
        sizes = _SIZES_TYPE.validate_python({key: vision.get(key) for key in keys})
    except ValidationError as error:
        raise _refused(error, vision, path, f"{spec.vision_config}.") from None
    if sizes["depth"] > _LARGEST_LAYERS or sizes["hidden_size"] % sizes["num_heads"]:
        raise ConfigError(
            f"{path}: vision_config: depth {sizes['depth']}, hidden_size {sizes['hidden_size']}, num_heads "
            f"{sizes['num_heads']} do not fit",
            _CORRECT,
        )
    if sizes["out_hidden_size"] != raw.get("hidden_size"):
        raise ConfigError(
            f"{path}: vision_config.out_hidden_size is {sizes['out_hidden_size']}, hidden_size is "
            f"{shown(raw.get('hidden_size'))}: images could not be put among the text",
            _CORRECT,
        )
    return tuple(sizes.items())
