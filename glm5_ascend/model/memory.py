"""Memory of a model's layers, from their shapes, which quantize, eval, analyze and serve add up. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable

from glm5_ascend.model.config import ModelConfig
from glm5_ascend.model.spec import Linear

FP32 = 4
#: Attention scores that the layer maths has in memory at a time, and rows of a weight that it converts at a time.
SCORES, ROWS_AT_ONCE = 2**24, 2048


def linear_values(c: ModelConfig, layer: int, prefix: str = "") -> int:
    """Values of a layer's linears whose names begin with `prefix`, without tables and routed experts."""
    linears = (w for w in c.backbone(layer) if isinstance(w, Linear) and w.name.startswith(prefix) and not w.is_table)
    return sum(math.prod(linear.shape(c.sizes)) for linear in linears)


def expert_values(c: ModelConfig) -> int:
    return 3 * c.hidden_size * c.moe_intermediate_size


def cached_values(c: ModelConfig, layers: Iterable[int]) -> int:
    """Values of a token in the caches of these layers of sparse attention: latents, rotated keys and indexer keys."""
    latents, keys = c.kv_lora_rank + c.qk_rope_head_dim, c.index_head_dim // c.index_kpool
    return sum(latents + keys * c.has_indexer(layer) for layer in layers if c.attention_kind(layer) == "sparse")


def forward_bytes(c: ModelConfig, length: int) -> int:
    """Bytes of one sequence's forward through a layer in fp32: the larger one of attention and MLP."""
    scores, index = min(SCORES, c.num_attention_heads * length**2), min(SCORES, length**2)
    heads = c.num_attention_heads * 2 * (c.qk_nope_head_dim + c.qk_rope_head_dim + c.v_head_dim)
    selection, scratch = 0, 4 * scores  # four: without a fused kernel
    if length > c.index_topk:
        selection, queries = length**2, 3 * length * c.index_n_heads * c.index_head_dim
        scratch = max(scratch, queries + 4 * index)
    attention = FP32 * (length * (heads + 4 * c.hidden_size) + scratch) + selection
    widest = max(c.intermediate_size, c.n_shared_experts * c.moe_intermediate_size)
    mlp = FP32 * length * (3 * widest + 5 * c.hidden_size)
    weight = 2 * ROWS_AT_ONCE * max(c.num_attention_heads * c.v_head_dim, c.intermediate_size)
    return max(attention, mlp) + weight
