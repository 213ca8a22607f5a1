"""`ModelConfig`: the sizes and switches of one model, and the walks over its weights.

Nothing here has a size built in: every number comes from config.json (`config_file.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from glm5_ascend.model.glm5 import GLM5
from glm5_ascend.model.spec import Linear, ModelSpec, Subgraph, Weight

#: All supported architectures, by `model_type`.
SPECS = {spec.model_type: spec for spec in (GLM5,)}


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
        """Quantization method of the source by config.json; "fp8" if the key is missing."""
        return (self.quantization_config or {}).get("quant_method", "fp8")

    @property
    def num_layers_with_mtp(self) -> int:
        """Main layers plus MTP layers, which follow them."""
        return self.num_hidden_layers + self.num_nextn_predict_layers

    @property
    def mtp_prefixes(self) -> tuple[str, ...]:
        """Prefixes of the weights of the MTP layers."""
        return tuple(map(self.spec.layer_prefix, range(self.num_hidden_layers, self.num_layers_with_mtp)))

    @property
    def absent_indexers(self) -> tuple[str, ...]:
        """Prefixes of the indexers of layers that share an earlier one's: engines drop such tensors."""
        layers = (layer for layer in range(self.num_layers_with_mtp) if not self.has_indexer(layer))
        return tuple(f"{self.spec.layer_prefix(layer)}{self.spec.indexer}." for layer in layers)

    def is_mtp(self, layer: int) -> bool:
        return layer >= self.num_hidden_layers

    def is_moe(self, layer: int) -> bool:
        return self.is_mtp(layer) or self.mlp_layer_types[layer] == "sparse"

    def has_indexer(self, layer: int) -> bool:
        """Return False for shared-indexer layers (GLM-5.2), which have no indexer tensors; MTP layers have one."""
        return self.is_mtp(layer) or self.indexer_types[layer] == "full"

    def indexer_readers(self, layer: int) -> int:
        """Number of layers that attend to the positions this layer's indexer selects: its own, and later sharers."""
        if not self.has_indexer(layer):
            return 0
        later = self.indexer_types[layer + 1 :]
        return 1 + next((number for number, kind in enumerate(later) if kind == "full"), len(later))

    def backbone(self, layer: int) -> tuple[Weight, ...]:
        """All weights of one layer except its routed experts."""
        kinds = self.spec.layer_kinds(self, layer)
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
