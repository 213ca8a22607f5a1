"""What config.json says about a `glm_moe_dsa` model, named once and checked once.

Nothing here has a size built in: every number comes from the file. Source of the keys: transformers 5.19
`GlmMoeDsaConfig`, vLLM 0.32 `deepseek_v2.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from glm5_ascend.errors import ConfigError, Glm5Error, shown
from glm5_ascend.files.untrusted import MAX_CONFIG_BYTES, read_json_object
from glm5_ascend.model.glm5 import GLM5
from glm5_ascend.model.layer_types import indexer_types, mlp_layer_types
from glm5_ascend.model.spec import Linear, ModelSpec, Subgraph, Weight

#: All supported architectures, by `model_type`.
SPECS = {spec.model_type: spec for spec in (GLM5,)}
#: Architectures users confuse with GLM-5, and what to tell them.
_OTHER_ARCHITECTURES = {
    "glm4_moe": "GLM-4.5/4.6/4.7 has no sparse attention",
    "glm5_next": "GLM-5.3-Flash (KDA linear attention) is another architecture",
    "deepseek_v32": "DeepSeek-V3.2 rotates RoPE halves, GLM-5 interleaves",
}
#: Optional keys that are looked into below, and the JSON type they must have when they are given.
_OPTIONAL: dict[str, type] = {
    "mlp_layer_types": list, "indexer_types": list, "index_topk_pattern": str, "first_k_dense_replace": int,
    "index_topk_freq": int, "index_skip_topk_offset": int, "rope_parameters": dict, "quantization_config": dict,
    "text_config": dict,
}  # fmt: skip
#: Counts that are iterated over: a damaged number must not become an endless loop. GLM-5 has 78, 1 and 256.
_LARGEST_COUNT = {"num_hidden_layers": 1000, "num_nextn_predict_layers": 100, "n_routed_experts": 10_000}
#: Sizes that are multiplied, and given to engines as 32-bit integers. GLM-5's largest is its context, 202752.
_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_attention_heads",
    "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
    "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "n_group", "topk_group",
    "index_n_heads", "index_head_dim", "index_topk", "max_position_embeddings",
)  # fmt: skip
_LARGEST_SIZE = 2**31 - 1
_PER_LAYER = ("mlp_layer_types", "indexer_types")


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of one model, and the walks over its weights; `path` is the file they came from."""

    path: Path
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_nextn_predict_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    mlp_layer_types: tuple[str, ...]  # "dense" | "sparse", one per main layer
    indexer_types: tuple[str, ...]  # "full" | "shared", one per main layer
    quantization_config: dict[str, Any] | None  # of the *source*, e.g. FP8 blocks

    @property
    def spec(self) -> ModelSpec:
        return SPECS[self.model_type]

    @property
    def sizes(self) -> dict[str, int]:
        """The numbers behind the size names of the spec's tables."""
        return self.spec.sizes(self)

    @property
    def quant_method(self) -> object:
        """How config.json says that the source is quantized; "fp8" where it does not say."""
        return (self.quantization_config or {}).get("quant_method", "fp8")

    @property
    def num_layers_with_mtp(self) -> int:
        """Main layers plus MTP layers, which sit right behind them."""
        return self.num_hidden_layers + self.num_nextn_predict_layers

    def is_mtp(self, layer: int) -> bool:
        return layer >= self.num_hidden_layers

    def is_moe(self, layer: int) -> bool:
        return self.is_mtp(layer) or self.mlp_layer_types[layer] == "sparse"

    def has_indexer(self, layer: int) -> bool:
        """Shared-indexer layers (GLM-5.2) own no indexer tensors; MTP layers always own one."""
        return self.is_mtp(layer) or self.indexer_types[layer] == "full"

    def layer_kinds(self, layer: int) -> tuple[str, ...]:
        """Kinds of `Block` whose weights a layer has."""
        return (
            "",
            *(["indexer"] if self.has_indexer(layer) else []),
            "moe" if self.is_moe(layer) else "dense",
            *(["mtp"] if self.is_mtp(layer) else []),
        )

    def indexer_readers(self, layer: int) -> int:
        """Number of layers that attend to the positions this layer's indexer selects: its own, and later sharers."""
        if not self.has_indexer(layer):
            return 0
        later = self.indexer_types[layer + 1 :]
        return 1 + next((number for number, kind in enumerate(later) if kind == "full"), len(later))

    def backbone(self, layer: int) -> tuple[Weight, ...]:
        """All weights of one layer except its routed experts."""
        kinds = self.layer_kinds(layer)
        return tuple(weight for block in self.spec.blocks if block.kind in kinds for weight in block.weights)

    def layer_weights(self, layer: int) -> Iterator[Weight]:
        """All weights of one layer, routed experts last."""
        yield from self.backbone(layer)
        if self.is_moe(layer):
            for expert in range(self.n_routed_experts):
                yield from self.spec.expert_linears(expert)

    def all_weights(self) -> Iterator[tuple[str, Weight]]:
        """`(prefix, weight)` of the whole model; the full module name is `prefix + weight.name`."""
        for weight in self.spec.global_weights:
            yield "", weight
        for layer in range(self.num_layers_with_mtp):
            for weight in self.layer_weights(layer):
                yield self.spec.layer_prefix(layer), weight

    def fused_groups(self, layer: int) -> Iterator[tuple[str, ...]]:
        """Modules of one layer, by full name, that the engine fuses into one or judges by one of them.

        Of the routed experts it reads expert 0's type only.
        """
        prefix = self.spec.layer_prefix(layer)
        names = {weight.name for weight in self.backbone(layer)}
        for group in self.spec.fused:
            if names.issuperset(group):
                yield tuple(prefix + name for name in group)
        if self.is_moe(layer):
            experts = range(self.n_routed_experts)
            yield tuple(prefix + linear.name for expert in experts for linear in self.spec.expert_linears(expert))

    def subgraphs(self, layer: int) -> tuple[Subgraph, ...]:
        """Smoothing pairs of one layer (without routed experts), in the order they are applied."""
        names = {weight.name for weight in self.backbone(layer)}
        return tuple(
            replace(pair, targets=tuple(name for name in pair.targets if name in names))
            for pair in self.spec.subgraphs_of_layer
            if pair.source in names
        )

    def source_rows(self, subgraph: Subgraph) -> list[int] | None:
        """Rows of the source weight that carry the scale, in the order of the target's columns; None means all.

        `ov`: only the V rows of each head of kv_b_proj; its K rows feed the scores, not o_proj.
        """
        if subgraph.kind != "ov":
            return None
        source = next(w for block in self.spec.blocks for w in block.weights if w.name == subgraph.source)
        assert isinstance(source, Linear)
        basis, sizes = self.spec.bases[source.basis_out], self.sizes
        starts = basis.starts(sizes, sizes[source.out])
        block = basis.block_size(sizes)
        return None if starts is None else [row for start in starts for row in range(start, start + block)]


def load_config(directory: Path) -> ModelConfig:
    """Read and check `directory/config.json`.

    Raises:
        ConfigError: no such directory or file, not JSON, another architecture, a missing or impossible value.
    """
    return parse_config(read_config(directory, counts=False), directory / "config.json")


def read_config(directory: Path, *, counts: bool = True, error: type[Glm5Error] = ConfigError) -> dict[str, Any]:
    """The keys of `directory/config.json` as they stand there, after `check_counts`, unless `counts` is False.

    Raises:
        ConfigError: no such directory or file, or a value that `check_counts` refuses. error: no sound JSON.
    """
    path = directory / "config.json"
    if not directory.is_dir():
        raise ConfigError(f"{directory}: no such directory", "give the directory of a GLM-5 checkpoint")
    if not path.exists():
        raise ConfigError(f"{path}: not found", "give the directory of a GLM-5 checkpoint (it holds config.json)")
    raw = read_json_object(path, max_bytes=MAX_CONFIG_BYTES, error=error, fix="download the file again")
    if counts:
        check_counts(raw, path)
    return raw


def parse_config(raw: dict[str, Any], path: Path) -> ModelConfig:
    """`load_config` on an already parsed dictionary."""
    read = _Reader(raw, path)
    check_architecture(raw, path)
    check_counts(raw, path)
    layers = read.positive("num_hidden_layers")
    config = ModelConfig(
        path=path,
        model_type=raw["model_type"],
        num_hidden_layers=layers,
        num_nextn_predict_layers=read.count("num_nextn_predict_layers"),
        rms_norm_eps=read.number("rms_norm_eps"),
        rope_theta=_rope_theta(raw, path),
        norm_topk_prob=bool(read.value("norm_topk_prob")),
        routed_scaling_factor=read.number("routed_scaling_factor"),
        mlp_layer_types=mlp_layer_types(raw, layers, path),
        indexer_types=indexer_types(raw, layers, path),
        quantization_config=raw.get("quantization_config"),
        **{key: read.positive(key) for key in _SIZES},
    )
    _check_fixed_choices(raw, path)
    _check_sizes(config)
    return config


def check_counts(raw: dict[str, Any], path: Path) -> None:
    """Bounds and types of what is looped over or looked into; a key that is not given is not asked for.

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
    for key, kind in _OPTIONAL.items():
        value = raw.get(key)
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            raise ConfigError(f"{path}: {key} is {shown(value)}, expected {kind.__name__}", "correct config.json")
    read = _Reader(raw, path)
    for key in _SIZES:
        if key in raw:
            read.positive(key)
    for key in _PER_LAYER:
        types, layers = raw.get(key), raw.get("num_hidden_layers")
        if types is not None and layers is not None and len(types) != layers:
            raise ConfigError(f"{path}: {key} has {len(types)} entries for {layers} layers", "correct config.json")


class _Reader:
    def __init__(self, raw: dict[str, Any], path: Path) -> None:
        self.raw, self.path = raw, path

    def value(self, key: str) -> Any:
        if key not in self.raw:
            raise ConfigError(f"{self.path}: key {key!r} is missing", "use the config.json of the original checkpoint")
        return self.raw[key]

    def number(self, key: str) -> float:
        value = self.value(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ConfigError(f"{self.path}: {key} is {shown(value)}, expected a number > 0", "correct config.json")
        return float(value)

    def positive(self, key: str) -> int:
        value = self.value(key)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ConfigError(f"{self.path}: {key} is {shown(value)}, expected an integer > 0", "correct config.json")
        if value > _LARGEST_SIZE:
            raise ConfigError(f"{self.path}: {key} is {shown(value)}, at most {_LARGEST_SIZE}", "correct config.json")
        return value

    def count(self, key: str) -> int:
        value = self.raw.get(key, 0)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(f"{self.path}: {key} is {shown(value)}, expected an integer >= 0", "correct config.json")
        return value


def check_architecture(raw: dict[str, Any], path: Path) -> None:
    """Raises `ConfigError` for another `model_type` than GLM-5's; names architectures that are confused with it."""
    model_type = raw.get("model_type")
    if isinstance(model_type, str) and model_type in SPECS:
        return
    why = _OTHER_ARCHITECTURES.get(
        model_type if isinstance(model_type, str) else "", "only GLM-5, 5.1, 5.2 and 5.3 have it"
    )
    said = f"{path}: model_type is {shown(model_type)}, expected {' or '.join(map(repr, SPECS))} ({why})"
    raise ConfigError(said, "give a GLM-5 checkpoint")


def _rope_theta(raw: dict[str, Any], path: Path) -> float:
    rope = raw.get("rope_parameters") or {}
    rope_type = rope.get("rope_type", "default")
    theta = rope.get("rope_theta", raw.get("rope_theta"))
    if rope_type != "default":
        what = f"{path}: rope_type {shown(rope_type)} is not supported, GLM-5 uses 'default'"
        raise ConfigError(what, "correct config.json")
    if isinstance(theta, bool) or not isinstance(theta, int | float) or not 0 < theta < math.inf:
        # A wrong theta gives fluent text from the wrong model, so there is no default.
        raise ConfigError(
            f"{path}: rope_parameters.rope_theta is {shown(theta)}", "use the config.json of the original checkpoint"
        )
    return float(theta)


def _check_fixed_choices(raw: dict[str, Any], path: Path) -> None:
    """Switches of the architecture that GLM-5 fixes and our forward relies on; a missing key means the default."""
    for key, wanted in (
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("tie_word_embeddings", False),
        ("scoring_func", "sigmoid"),
        ("topk_method", "noaux_tc"),
        ("rope_interleave", True),
        ("indexer_rope_interleave", True),
    ):
        if raw.get(key, wanted) != wanted:
            raise ConfigError(f"{path}: {key} is {shown(raw[key])}, GLM-5 has {wanted!r}", "give a GLM-5 checkpoint")


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
    if config.qk_rope_head_dim % 2 or config.index_head_dim < config.qk_rope_head_dim:
        raise ConfigError(f"{config.path}: qk_rope_head_dim does not fit", "correct config.json")
