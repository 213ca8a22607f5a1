"""The planned model: its sizes, the type of every linear, and the types of its caches.

It comes from a name of the family (`glm-5.2`) and a quantization, or from a checkpoint directory.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from glm5_ascend.checkpoint.types import DESCRIPTION_NAME, FLOAT, QUANTIZED, W8A8_DYNAMIC
from glm5_ascend.errors import CheckpointError, PlanError, shown
from glm5_ascend.files.resources import near
from glm5_ascend.files.untrusted import MAX_BYTES_BY_TENSOR, read_json_object
from glm5_ascend.files.yaml_file import read_yaml
from glm5_ascend.model.config import ModelConfig
from glm5_ascend.model.config_file import load_config, parse_config
from glm5_ascend.model.spec import Linear, Vector
from glm5_ascend.plan.data_files import Cache, FamilyFile, QuantizationKeys, data_file

if TYPE_CHECKING:
    from glm5_ascend.checkpoint.index import CheckpointDir

#: Entry of a layer with INT8 indexer keys in the description.
_INT8_KEYS = re.compile(r"model\.layers\.(\d{1,6})\.self_attn\.indexer\.quant_type")
CACHES: tuple[str, ...] = get_args(Cache)


@dataclass(frozen=True, eq=False)
class PlannedModel:
    """The model to serve. Compared by identity, so that results computed from it can be cached.

    Attributes:
        types: type of every linear by full module name. Of a layer's routed experts only the first: the engine uses
            its type for all.
        cache: caches that are INT8 at run time: none | li | li+sfa.
        full_layers: main layers that compute their own top-k; more layers than these may have an indexer.
        stored_bytes: bytes of all tensors of a real checkpoint, None for a model known by name only.
        rotated: the MTP layer has `rot.weight`.
        marked: layers whose indexer keys a checkpoint marks as INT8; empty: all.
    """

    name: str
    quantization: str
    config: ModelConfig
    types: Mapping[str, str]
    cache: str
    full_layers: int
    stored_bytes: int | None = None
    rotated: bool = False
    marked: frozenset[int] = frozenset()

    @property
    def needs_fp8(self) -> bool:
        quantization = family().quantizations.get(self.quantization)
        return quantization is not None and quantization.fp8

    @property
    def little_data(self) -> str | None:
        """A sentence about missing data of its quantization."""
        quantization = family().quantizations.get(self.quantization)
        return None if quantization is None else quantization.little_data

    @property
    def expert_type(self) -> str:
        """Type of the main model's routed experts."""
        moe = next((i for i in range(self.config.num_hidden_layers) if self.config.is_moe(i)), None)
        if moe is None:
            return FLOAT
        return self.types[f"{self.config.spec.layer_prefix(moe)}{self.config.spec.expert_prefix(0)}.gate_proj"]

    def type_of(self, layer: int, part: str) -> str:
        return self.types[self.config.spec.layer_prefix(layer) + part]


@functools.cache
def family() -> FamilyFile:
    """The data file of known models and quantizations."""
    return read_yaml(data_file("models.yaml"), FamilyFile)


@functools.cache
def named(
    name: str, quantization: str, cache: str | None = None, index_cache: bool = False, layers: int | None = None
) -> PlannedModel:
    """A member of the family by name.

    Args:
        layers: number of main layers, if the checkpoint was cut.
        cache: INT8 caches; None: those of the quantization.
        index_cache: three of four layers reuse another layer's top-k (vllm-ascend's `use_index_cache`).
    """
    data = family()
    if name not in data.models:
        raise PlanError(f"--model {name}: unknown model", f"{near(name, data.models)}, or give a directory")
    if quantization not in data.quantizations:
        raise PlanError(f"--quant {quantization}: unknown quantization", near(quantization, data.quantizations))
    # The rotary base decides no size and no time; the published values of GLM-5 and 5.1 are not confirmed.
    raw = data.common | data.models[name] | {"rope_theta": 1.0} | ({"num_hidden_layers": layers} if layers else {})
    config = parse_config(raw, Path(f"{name} (models.yaml)"))
    rules = data.quantizations[quantization]
    types = {prefix + part.name: _rule(rules, config, prefix, part.name) for prefix, part in _linears(config)}
    full, rotated = config.indexer_types.count("full"), rules.experts != FLOAT
    model = PlannedModel(name, quantization, config, types, rules.cache, full, rotated=rotated)
    return adjusted(model, cache, index_cache)


def from_directory(directory: Path, cache: str | None = None, index_cache: bool = False) -> PlannedModel:
    """Read a checkpoint: sizes from config.json, types from its description, bytes from the shards' headers.

    Raises:
        ConfigError, CheckpointError: a missing or contradictory value, with its file.
    """
    from glm5_ascend.checkpoint.index import CheckpointDir  # imports torch, which a plan by name does not need

    config, path = load_config(directory), directory / DESCRIPTION_NAME
    description = read_json_object(path, max_bytes=MAX_BYTES_BY_TENSOR) if path.exists() else {}
    files = CheckpointDir(directory)
    if path.exists():
        types, quantization = (
            _described_types(description, path, config),
            str(description.get("model_quant_type", "mixed")),
        )
        _check_integers(files, types)
    else:
        types, quantization = _stored_types(files, config), "fp8"
        _check_integers(files, {module: kind for module, kind in types.items() if kind == FLOAT})
    if set(types.values()) == {FLOAT}:
        quantization = "bf16"
    marked = frozenset(int(match[1]) for key in description if (match := _INT8_KEYS.fullmatch(str(key))))
    model = PlannedModel(
        directory.name, quantization, config, types, "li" if marked else "none",
        config.indexer_types.count("full"), sum(entry.end - entry.start for entry in files.entries.values()),
        description.get("is_rot_used") is True, marked,
    )  # fmt: skip
    return adjusted(model, cache, index_cache)


def _described_types(description: Mapping[str, object], path: Path, config: ModelConfig) -> dict[str, str]:
    """Type of every linear by the description."""
    types = {}
    for prefix, part in _linears(config):
        kind = description.get(f"{prefix}{part.name}.weight", FLOAT)
        if kind not in (FLOAT, *QUANTIZED):
            raise CheckpointError(f"{path}: {prefix}{part.name}.weight: unknown type {kind!r:.40}", "quantize again")
        types[prefix + part.name] = str(kind)
    return types


def _stored_types(files: CheckpointDir, config: ModelConfig) -> dict[str, str]:
    """Type of every linear by the shards' headers, without a description: FP8 counts as in `--quant fp8`."""
    if config.quant_method != "fp8":
        raise CheckpointError(
            f"{files.directory / 'config.json'}: unsupported quant_method {shown(config.quant_method)}",
            "plan by name: --model glm-5 --quant w4a8",
        )
    types = {}
    for prefix, part in _linears(config):
        entry = files.entries.get(f"{prefix}{part.name}.weight")
        fp8 = entry is not None and entry.dtype.is_floating_point and entry.dtype.itemsize == 1
        types[prefix + part.name] = W8A8_DYNAMIC if fp8 else FLOAT
    return types


def _check_integers(files: CheckpointDir, types: Mapping[str, str]) -> None:
    """Check that the shards have integers where the description says so, and only there."""
    for module, kind in types.items():
        entry = files.entries.get(f"{module}.weight")
        if entry is not None and entry.dtype.is_floating_point != (kind == FLOAT):
            raise CheckpointError(
                f"{files.directory}: {module}.weight is stored as {str(entry.dtype).removeprefix('torch.')} but "
                f"{DESCRIPTION_NAME} says {kind}",
                "run `glm5-ascend verify` on it",
            )


def adjusted(model: PlannedModel, cache: str | None, index_cache: bool) -> PlannedModel:
    """The model with other run-time flags."""
    if cache is not None and cache not in CACHES:
        raise PlanError(f"--cache {cache}: unknown", near(cache, CACHES))
    full = model.full_layers
    if index_cache:
        # The override sets a period of 4 and no offset: the engine's default offset is 2 (vllm-ascend 182b75e).
        full = min(full, sum(max(i - 1, 0) % 4 == 0 for i in range(model.config.num_hidden_layers)))
    return replace(model, cache=cache or model.cache, full_layers=full)


def counted_parts(config: ModelConfig) -> Iterator[tuple[str, Linear | Vector, int]]:
    """`(prefix, part, count)` of the whole model; the first expert stands for all of its layer."""
    yield from (("", part, 1) for part in config.spec.global_weights)
    for layer in range(config.num_layers_with_mtp):
        yield from ((config.spec.layer_prefix(layer), part, 1) for part in config.backbone(layer))
        if config.is_moe(layer):
            yield from (
                (config.spec.layer_prefix(layer), part, config.n_routed_experts)
                for part in config.spec.expert_linears(0)
            )


def _linears(config: ModelConfig) -> list[tuple[str, Linear]]:
    return [(prefix, part) for prefix, part, _ in counted_parts(config) if isinstance(part, Linear)]


def _rule(rules: QuantizationKeys, config: ModelConfig, prefix: str, part: str) -> str:
    if part in config.spec.always_float or not prefix or config.is_mtp(int(prefix.split(".")[2])):
        return FLOAT
    if part.startswith("mlp.experts."):
        return rules.experts
    return rules.attention if part.startswith("self_attn.") else rules.mlp
