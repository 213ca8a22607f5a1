"""The planned model: sizes, types of linears and caches, by a name and a quantization or of a checkpoint."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from glm5_ascend.checkpoint.types import DESCRIPTION_NAME, FLOAT, QUANTIZED, W8A8_DYNAMIC
from glm5_ascend.errors import CheckpointError, PlanError
from glm5_ascend.files.resources import near
from glm5_ascend.files.yaml_file import read_yaml
from glm5_ascend.model.config import ModelConfig
from glm5_ascend.model.config_file import parse_config
from glm5_ascend.model.spec import Linear
from glm5_ascend.plan.inputs import Cache, Keys, data_file

LinearType = Literal["FLOAT", "W8A8", "W8A8_DYNAMIC", "W4A8_DYNAMIC"]


class QuantizationKeys(Keys):
    """Types of the routed experts, of the attention's linears, of dense and shared MLPs; caches at run time; fp8: needs
    units for FP8, the types only say how many bytes a weight takes."""

    experts: LinearType
    attention: LinearType
    mlp: LinearType
    cache: Cache
    fp8: bool = False
    little_data: str | None = None


class FamilyFile(Keys):
    models: dict[str, dict[str, Any]]
    quantizations: dict[str, QuantizationKeys]


@dataclass(frozen=True, eq=False)
class PlannedModel:
    """The model to serve, compared by identity, so that results computed from it can be cached.

    Attributes:
        types: type of every linear by full module name; of routed experts only the first, whose type the engine uses.
        cache: caches that are INT8: none | li | li+sfa. marked: layers whose indexer keys are; empty: all.
        stored_bytes: of all tensors of a checkpoint; None for a name. rotated: the MTP layer has `rot.weight`.
        rules: what its quantization means, if that has a name.
    """

    name: str
    quantization: str
    config: ModelConfig
    types: Mapping[str, str]
    cache: str
    stored_bytes: int | None = None
    rotated: bool = False
    marked: frozenset[int] = frozenset()
    rules: QuantizationKeys | None = None

    @property
    def expert_type(self) -> str:
        """Type of the main model's routed experts."""
        moe = next((i for i in range(self.config.num_hidden_layers) if self.config.is_moe(i)), None)
        return FLOAT if moe is None else self.type_of(moe, "mlp.experts.0.gate_proj")

    @property
    def attention_type(self) -> str:
        """Type of the projections of the main model's sparse attention."""
        return self.type_of(self.layers("sparse")[0], "self_attn.q_a_proj")

    def type_of(self, layer: int, linear: str) -> str:
        return self.types[self.config.spec.layer_prefix(layer) + linear]

    def layers(self, attention: str, stage: range | None = None) -> list[int]:
        """Main layers with this kind of attention: sparse | linear; of a pipeline stage, or all."""
        layers = stage or range(self.config.num_hidden_layers)
        return [layer for layer in layers if self.config.attention_kind(layer) == attention]

    def topk_layers(self, index_cache: bool) -> int:
        """Main layers that compute their own top-k, which may be fewer than those with an indexer."""
        # vllm-ascend's `use_index_cache` with a period of 4; its default offset is 2 (182b75e).
        full = sum(map(self.config.has_indexer, range(self.config.num_hidden_layers)))
        reused = sum(max(i - 1, 0) % 4 == 0 for i in range(self.config.num_hidden_layers))
        return min(full, reused) if index_cache else full


@functools.cache
def family() -> FamilyFile:
    """The data file of known models and quantizations."""
    return read_yaml(data_file("models.yaml"), FamilyFile)


@functools.cache
def named(name: str, quantization: str, cache: str | None = None, layers: int | None = None) -> PlannedModel:
    """A member of the family by name (PlanError: unknown), with INT8 caches (None: those of the quantization), and main
    layers if the checkpoint was cut."""
    data = family()
    asked, name, quantization = name, name.rpartition("/")[2].lower(), quantization.lower()
    if name not in data.models:
        raise PlanError(f"--model {asked}: unknown model", f"{near(name, data.models)}, or give a directory")
    if quantization not in data.quantizations:
        raise PlanError(f"--quant {quantization}: unknown quantization", near(quantization, data.quantizations))
    # The rotary base decides no size and no time; the published values of GLM-5 and 5.1 are not confirmed.
    raw = data.models[name] | {"rope_theta": 1.0} | ({"num_hidden_layers": layers} if layers else {})
    config = parse_config(raw, Path(f"{name} (models.yaml)"))
    rules = data.quantizations[quantization]

    def type_of(prefix: str, linear: str) -> str:
        layer = config.spec.layer_of(prefix)
        if linear in config.engines.why_float or layer is None or config.is_mtp(layer):
            return FLOAT
        if linear.startswith("self_attn."):
            return FLOAT if config.attention_types else rules.attention
        return rules.experts if linear.startswith("mlp.experts.") else rules.mlp

    weights = config.counted_weights()
    types = {prefix + w.name: type_of(prefix, w.name) for prefix, w, _ in weights if isinstance(w, Linear)}
    rotated = rules.experts != FLOAT and bool(config.spec.bases)
    return with_cache(PlannedModel(name, quantization, config, types, rules.cache, rotated=rotated, rules=rules), cache)


def from_directory(directory: Path, cache: str | None = None) -> PlannedModel:
    """Read a checkpoint: sizes from config.json, types from its description, bytes from the shards' headers; raises
    ConfigError or CheckpointError, which names the file and the value."""
    # It imports torch, which a plan by name does not need.
    from glm5_ascend.fidelity.evaluation.stored_model import StoredModel

    checkpoint, types = StoredModel(directory), dict[str, str]()
    config, description = checkpoint.config, checkpoint.description
    for name in (prefix + w.name for prefix, w, _ in config.counted_weights() if isinstance(w, Linear)):
        entry = checkpoint.entry(f"{name}.weight")
        # a source's types are those of the shards' headers; FP8 counts as in `--quant fp8`
        narrow = not description and entry is not None and entry.dtype.itemsize == 1
        scheme = types[name] = W8A8_DYNAMIC if narrow else str(description.get(f"{name}.weight", FLOAT))
        if scheme not in (FLOAT, *QUANTIZED):
            raise CheckpointError(f"{directory}: {name}.weight: unknown type {scheme!r:.40}", "quantize again")
        if entry is not None and not narrow and entry.dtype.is_floating_point != (scheme == FLOAT):
            raise CheckpointError(
                f"{directory}: {name}.weight is stored as {str(entry.dtype).removeprefix('torch.')} but "
                f"{DESCRIPTION_NAME} says {scheme}",
                "run `glm5-ascend verify` on it",
            )
    quantization = str(description.get("model_quant_type", "mixed")) if description else "fp8"
    if set(types.values()) == {FLOAT}:
        quantization = "bf16"
    marked = frozenset(filter(checkpoint.int8_keys, range(config.num_layers_with_mtp)))
    stored = sum(entry.end - entry.start for entry in checkpoint.stored.entries.values())
    model = PlannedModel(
        directory.name, quantization, config, types, "li" if marked else "none", stored,
        description.get("is_rot_used") is True, marked, family().quantizations.get(quantization),
    )  # fmt: skip
    if model.expert_type != FLOAT and description:  # model_quant_type is that of most linears, not of most bytes
        model = replace(model, quantization=model.expert_type)
    return with_cache(model, cache)


def with_cache(model: PlannedModel, cache: str | None) -> PlannedModel:
    """The model with other INT8 caches; None: unchanged."""
    if cache is not None and cache not in get_args(Cache):
        raise PlanError(f"--cache {cache}: unknown", near(cache, get_args(Cache)))
    if model.config.attention_types and (cache or model.cache) != "none":
        raise PlanError(f"{model.name}: vllm-ascend keeps the indexer keys of this model in bf16", "--cache none")
    return model if cache in (None, model.cache) else replace(model, cache=str(cache))
