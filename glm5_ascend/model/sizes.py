"""`ModelSizes`: the numbers of one model, as config.json has them, and what each of its layers is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ModelSizes:
    """Sizes and switches of one model, and what each layer is; `path` is the file they came from.

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

    def is_mtp(self, layer: int) -> bool:
        return layer >= self.num_hidden_layers

    def is_moe(self, layer: int) -> bool:
        return self.is_mtp(layer) or self.mlp_layer_types[layer] == "sparse"

    def attention_kind(self, layer: int) -> str:
        """Return "sparse" or "linear"; MTP layers are sparse."""
        return self.attention_types[layer] if self.attention_types and not self.is_mtp(layer) else "sparse"

    def has_indexer(self, layer: int) -> bool:
        """Return True for a layer of sparse attention with an indexer of its own; MTP layers have one."""
        full = self.is_mtp(layer) or self.indexer_types[layer] == "full"
        return full and self.attention_kind(layer) == "sparse"
