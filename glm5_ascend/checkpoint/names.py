"""Other names under which public checkpoints store the same weights, and weights that are parts of one tensor."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from glm5_ascend.checkpoint.shards import TensorEntry
from glm5_ascend.model.config import ModelConfig

#: The model without its head's class around it.
_WITHOUT_HEAD = (r"^(?=layers\.|embed_tokens\.|norm\.)", "model.")


@dataclass(frozen=True)
class TensorView:
    """A weight inside a stored tensor: its elements from `first` on, in `shape`."""

    stored: str
    first: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StoredNames:
    """The stored tensor of every weight of a model: under the hub's name, another writer's, or as a part of one.

    Attributes:
        weights: by the hub's name, of the weights that are stored; an MTP layer without an embedding or head of its own
            has the main model's.
        renamed: hub's name -> stored name, of weights that were found under another one.
        hub_names: stored name -> the name that the rules make of it, of all tensors with other names than the hub's.
    """

    weights: dict[str, TensorView]
    renamed: dict[str, str]
    hub_names: dict[str, str]


def find_weights(config: ModelConfig, entries: Mapping[str, TensorEntry]) -> StoredNames:
    rules = [(re.compile(pattern), to) for pattern, to in (_WITHOUT_HEAD, *config.spec.other_names)]
    expected = [prefix + weight.tensor_name for prefix, weight in config.all_weights()]
    hub_names = {stored: _hub_name(stored, rules) for stored in entries.keys() - set(expected)}
    stored_as = {name: stored for stored, name in hub_names.items()} | {name: name for name in entries}
    views: dict[str, TensorView] = {}
    for layer in filter(config.is_moe, range(config.num_layers_with_mtp)):
        views |= dict(_fused_experts(config, layer, stored_as, entries))
    for layer in range(config.num_layers_with_mtp):
        views |= dict(_fused_parameters(config, layer, stored_as, entries))
    views |= {name: TensorView(stored, 0, entries[stored].shape) for name, stored in stored_as.items()}
    weights = {name: views[name] for name in expected if name in views}
    renamed = {name: view.stored for name, view in weights.items() if view.stored != name}
    for prefix in config.mtp_prefixes:
        for copy, original in config.spec.mtp_copies.items():
            if (view := weights.get(f"{original}.weight")) is not None:
                weights.setdefault(f"{prefix}{copy}.weight", view)
    return StoredNames(weights, renamed, hub_names)


def _hub_name(stored: str, rules: Iterable[tuple[re.Pattern[str], str]]) -> str:
    for pattern, to in rules:
        stored = pattern.sub(to, stored)
    return stored


def _fused_experts(
    config: ModelConfig, layer: int, stored_as: Mapping[str, str], entries: Mapping[str, TensorEntry]
) -> Iterator[tuple[str, TensorView]]:
    """(name, place) of a layer's linears inside transformers' `gate_up_proj` [E, 2 I, H] or `down_proj` [E, H, I]."""
    prefix = config.spec.layer_prefix(layer) + config.spec.experts_prefix
    for fused, linears in config.spec.fused_experts.items():
        stored = stored_as.get(f"{prefix}{fused}") or stored_as.get(f"{prefix}{fused}.weight")
        shape = entries[stored].shape if stored else ()
        if not stored or len(shape) != 3 or shape[1] % len(linears):
            continue
        rows, columns = shape[1] // len(linears), shape[2]
        for expert in range(min(shape[0], config.n_routed_experts)):
            for index, linear in enumerate(linears, start=expert * len(linears)):
                view = TensorView(stored, index * rows * columns, (rows, columns))
                yield f"{prefix}{expert}.{linear}.weight", view


def _fused_parameters(
    config: ModelConfig, layer: int, stored_as: Mapping[str, str], entries: Mapping[str, TensorEntry]
) -> Iterator[tuple[str, TensorView]]:
    """(name, place) of a layer's parameters inside one tensor that has their rows one behind the other."""
    prefix = config.spec.layer_prefix(layer)
    for fused, names in config.spec.fused_parameters.items():
        stored = stored_as.get(prefix + fused)
        if stored and (shape := entries[stored].shape) and shape[0] % len(names) == 0:
            part_shape = (shape[0] // len(names), *shape[1:])
            for index, name in enumerate(names):
                yield prefix + name, TensorView(stored, index * math.prod(part_shape), part_shape)
