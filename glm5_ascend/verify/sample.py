"""A share of a checkpoint's weights, drawn by a seed: whole layers and whole experts, some of every kind."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random

from glm5_ascend.checkpoint.checks.loaded_checkpoint import LoadedCheckpoint
from glm5_ascend.checkpoint.types import FLOAT, ROT_NAME
from glm5_ascend.errors import Glm5Error
from glm5_ascend.model.config import ModelConfig
from glm5_ascend.model.spec import Linear, Subgraph, Weight

_NUMBER = re.compile(r"\.\d+\.")
_TEXT = re.compile(r"(\d{1,3}(?:\.\d{1,6})?)%(?:,seed=(\d{1,9}))?")


@dataclass(frozen=True)
class Unit:
    """Weights that no scale leaves: a layer without its routed experts, one of these, or what is in no layer.

    Attributes:
        subgraphs: pairs between which a scale may have moved.
    """

    prefix: str
    weights: tuple[Weight, ...]
    subgraphs: tuple[Subgraph, ...]

    @property
    def modules(self) -> list[str]:
        """Full names of its tensors but for their last word, in which those of a quantized linear differ."""
        return [(self.prefix + weight.tensor_name).rpartition(".")[0] for weight in self.weights]


@dataclass(frozen=True)
class Share:
    """A share above 0, at most 1, and the seed of the draw."""

    share: float
    seed: int = 0

    @classmethod
    def parse(cls, text: str) -> Share:
        """Read "2%" or "2%,seed=7"; raises Glm5Error."""
        match = _TEXT.fullmatch(text)
        if match is None or not 0 < float(match[1]) <= 100:
            raise Glm5Error(f"--sample: {text!r:.40} is not a share", "write it as in --sample 2% or 2%,seed=7")
        return cls(float(match[1]) / 100, int(match[2] or 0))

    def of(self, config: ModelConfig, schemes: Mapping[str, str]) -> frozenset[str]:
        """Draw modules: of layers, and of experts, with the same weights and quantization at least one.

        Norms, routers and what is no part of a layer are always among them.

        Args:
            schemes: type of every linear, by full module name.
        """
        chance, alike = Random(self.seed), defaultdict[tuple[tuple[str, str], ...], list[Unit]](list)
        for unit in units(config):
            kinds = ((_NUMBER.sub(".N.", name), schemes.get(name, FLOAT)) for name in unit.modules)
            alike[tuple(kinds)].append(unit)
        small = (
            prefix + weight.tensor_name for prefix, weight in config.all_weights() if not isinstance(weight, Linear)
        )
        always = frozenset(name.rpartition(".")[0] for name in (ROT_NAME, *small))
        return always.union(
            module
            for same in alike.values()
            for unit in chance.sample(same, max(1, round(self.share * len(same))))
            for module in unit.modules
        )


def units(config: ModelConfig) -> Iterator[Unit]:
    """All weights of the model, in order."""
    yield Unit("", config.global_weights, ())
    for layer in range(config.num_layers_with_mtp):
        prefix = config.spec.layer_prefix(layer)
        yield Unit(prefix, config.backbone(layer), config.subgraphs(layer))
        for expert in range(config.n_routed_experts if config.is_moe(layer) else 0):
            yield Unit(prefix, config.spec.expert_linears(expert), config.spec.expert_subgraphs(expert))


def not_read(checkpoint: LoadedCheckpoint, sample: frozenset[str]) -> str:
    """Describe what a sample leaves out."""
    sizes = {name: entry.nbytes for name, entry in checkpoint.entries.items()}
    left_out = sum(size for name, size in sizes.items() if name.rpartition(".")[0] not in sample)
    return (
        f"values of {left_out / 1e9:.2f} of {sum(sizes.values()) / 1e9:.2f} GB, and the hashes of the shards: "
        "--sample reads the others"
    )
