"""`ModelConfig`: the walks over the weights of one model, whose sizes come from config.json (`config_file.py`)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from glm5_ascend.engine_view import ENGINE_VIEWS, EngineView
from glm5_ascend.model.glm5 import GLM5
from glm5_ascend.model.glm5_next import GLM5_NEXT
from glm5_ascend.model.sizes import ModelSizes
from glm5_ascend.model.spec import Architecture, Block, Linear, Subgraph, Vector, Weight

#: All supported architectures, by `model_type`.
SPECS = {spec.model_type: spec for spec in (GLM5, GLM5_NEXT)}


@dataclass(frozen=True)
class ModelConfig(ModelSizes):
    @property
    def spec(self) -> Architecture:
        return SPECS[self.model_type]

    @property
    def engines(self) -> EngineView:
        return ENGINE_VIEWS[self.model_type]

    @property
    def sizes(self) -> dict[str, int]:
        """The numbers behind the size names of the spec's tables."""
        return self.spec.sizes(self)

    @property
    def stream_width(self) -> int:
        """Values of a token between two main layers: hidden_size, times the number of residual streams."""
        return self.hc_mult * self.hidden_size

    @property
    def num_layers_with_mtp(self) -> int:
        """Main layers plus MTP layers, which follow them."""
        return self.num_hidden_layers + self.num_nextn_predict_layers

    @property
    def mtp_prefixes(self) -> tuple[str, ...]:
        return tuple(map(self.spec.layer_prefix, range(self.num_hidden_layers, self.num_layers_with_mtp)))

    @property
    def absent_indexers(self) -> tuple[str, ...]:
        """Prefixes of the indexers of layers that share an earlier one's: engines drop such tensors."""
        layers = filter(self.shares_indexer, range(self.num_layers_with_mtp))
        return tuple(f"{self.spec.layer_prefix(layer)}{self.spec.indexer}." for layer in layers)

    @property
    def global_weights(self) -> tuple[Weight, ...]:
        """Weights outside the layers of the language model: embedding, head, final norm, and the vision tower's."""
        tower = self.spec.tower
        return self.spec.global_weights + (() if tower is None else tower.weights(self.sizes))

    def streams(self, layer: int) -> int:
        """Return the number of residual streams of a layer; an MTP layer has one."""
        return 1 if self.is_mtp(layer) else self.hc_mult

    def shares_indexer(self, layer: int) -> bool:
        """Return True for a layer that works on the selection of an earlier one (GLM-5.2): it has no indexer."""
        return self.attention_kind(layer) == "sparse" and not self.has_indexer(layer)

    def indexer_readers(self, layer: int) -> int:
        """Number of layers that attend to the positions this layer's indexer selects: its own, and later sharers."""
        if not self.has_indexer(layer):
            return 0
        later = range(layer + 1, self.num_hidden_layers)
        return 1 + sum(map(self.shares_indexer, itertools.takewhile(lambda other: not self.has_indexer(other), later)))

    def backbone(self, layer: int) -> tuple[Weight, ...]:
        """All weights of one layer except its routed experts."""
        return tuple(weight for block in self.blocks(layer) for weight in block.weights)

    def blocks(self, layer: int) -> tuple[Block, ...]:
        """The blocks of weights that a layer has, in the order in which they are written."""
        names = self.spec.blocks_of_layer(self, layer)
        return tuple(block for block in self.spec.blocks if block.name in names)

    def group_of(self, prefix: str, weight: Weight) -> str:
        """The row of a weight in tables of modules, such as "routed experts" or "MTP layer"."""
        layer, tower = self.spec.layer_of(prefix), self.spec.tower
        if layer is None:
            in_tower = tower is not None and weight.name.startswith(tower.prefix)
            return "vision tower" if in_tower else "embeddings, head, final norm"
        if self.is_mtp(layer):
            return "MTP layer"
        block = next((block.name for block in self.blocks(layer) if weight in block.weights), "routed experts")
        return "norms" if isinstance(weight, Vector) and block.endswith("attention") else block

    def layer_weights(self, layer: int) -> Iterator[Weight]:
        yield from self.backbone(layer)
        if self.is_moe(layer):
            for expert in range(self.n_routed_experts):
                yield from self.spec.expert_linears(expert)

    def all_weights(self) -> Iterator[tuple[str, Weight]]:
        """`(prefix, weight)` of the whole model; the full module name is `prefix + weight.name`."""
        for weight in self.global_weights:
            yield "", weight
        for layer in range(self.num_layers_with_mtp):
            for weight in self.layer_weights(layer):
                yield self.spec.layer_prefix(layer), weight

    def counted_weights(self) -> Iterator[tuple[str, Weight, int]]:
        """`(prefix, weight, count)` of the whole model; the first routed expert stands for all of its layer."""
        yield from (("", weight, 1) for weight in self.global_weights)
        for layer in range(self.num_layers_with_mtp):
            prefix = self.spec.layer_prefix(layer)
            yield from ((prefix, weight, 1) for weight in self.backbone(layer))
            if self.is_moe(layer):
                yield from ((prefix, weight, self.n_routed_experts) for weight in self.spec.expert_linears(0))

    def fused_groups(self, layer: int) -> Iterator[tuple[str, ...]]:
        """Modules of one layer, by full name, that the engine fuses into one or judges by one of them.

        Of the routed experts it reads expert 0's type only.
        """
        prefix = self.spec.layer_prefix(layer)
        names = {weight.name for weight in self.backbone(layer)}
        for group in self.engines.fused:
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
