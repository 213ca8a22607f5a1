"""`ModelConfig`: the sizes and switches of one model, and the walks over its weights.

Nothing here has a size built in: every number comes from config.json (`config_file.py`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from glm5_ascend.errors import ConfigError
from glm5_ascend.model.glm5 import GLM5
from glm5_ascend.model.glm5_next import GLM5_NEXT
from glm5_ascend.model.spec import Linear, ModelSpec, Subgraph, Weight

#: All supported architectures, by `model_type`.
SPECS = {spec.model_type: spec for spec in (GLM5, GLM5_NEXT)}


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of one model, and the walks over its weights; `path` is the file they came from.

    Fields with a default belong to GLM-5.3-Flash; the default is GLM-5's meaning.
    """

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
    attention_types: tuple[str, ...] = ()  # "linear" | "sparse", one per main layer; empty: all sparse
    index_kpool: int = 1  # tokens behind one key of the indexer
    linear_num_heads: int = 0
    linear_head_dim: int = 0
    linear_conv_kernel_dim: int = 0
    linear_lower_bound: float = 0.0
    hc_mult: int = 1  # residual streams
    hc_sinkhorn_iters: int = 0
    hc_eps: float = 0.0
    swiglu_limit: float = math.inf
    vision: tuple[tuple[str, int], ...] = ()  # keys and sizes of `vision_config`

    @property
    def spec(self) -> ModelSpec:
        return SPECS[self.model_type]

    def require(self, step: str) -> None:
        """Raise `ConfigError` where `step` (a command, or a part of one) does not support this architecture."""
        if why := self.spec.lacks.get(step):
            raise ConfigError(
                f"{self.path}: {step} does not take {self.spec.label} yet: {why}", "give a GLM-5 checkpoint"
            )

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
        """Prefixes of the weights of the MTP layers."""
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

    def is_mtp(self, layer: int) -> bool:
        return layer >= self.num_hidden_layers

    def is_moe(self, layer: int) -> bool:
        return self.is_mtp(layer) or self.mlp_layer_types[layer] == "sparse"

    def streams(self, layer: int) -> int:
        """Return the number of residual streams of a layer; an MTP layer has one."""
        return 1 if self.is_mtp(layer) else self.hc_mult

    def attention_kind(self, layer: int) -> str:
        """Return "sparse" or "linear"; MTP layers are sparse."""
        return self.attention_types[layer] if self.attention_types and not self.is_mtp(layer) else "sparse"

    def has_indexer(self, layer: int) -> bool:
        """Return True for a layer of sparse attention with an indexer of its own; MTP layers have one."""
        full = self.is_mtp(layer) or self.indexer_types[layer] == "full"
        return full and self.attention_kind(layer) == "sparse"

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
