"""The structure of a `glm_moe_dsa` model as data: which tensors exist, what feeds what, which basis each side lives in.

Every algorithm (norm fusion, rotation, smoothing, calibration, checks) walks this table; none of them names a tensor.
Names inside a layer are relative to `model.layers.N.`; the others are full names.
Source: transformers 5.19 `glm_moe_dsa`, msModelSlim 26.1.0 `model/glm_5/quarot.py` (facts, not code).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from glm5_ascend.model.config import ModelConfig

# A basis names the space a vector lives in. QuaRot gives each an orthogonal matrix (quantize/rotation.py).
HIDDEN = "hidden"  # the residual stream
HIDDEN_PAIR = "hidden_pair"  # concat(embedding, hidden), input of eh_proj
Q_LORA = "q_lora"
KV_LORA = "kv_lora"
KV_LORA_ROPE = "kv_lora_rope"  # latent rotated, RoPE part untouched
HEADS_NOPE_V = "heads_nope_v"  # per head: K rows untouched, V rows rotated
HEADS_V = "heads_v"
FIXED = "fixed"  # never rotated


@dataclass(frozen=True)
class Linear:
    """A weight [out, in]; `norm` is what its input was normalised by (its gain can be folded into the weight)."""

    name: str
    out: str
    inp: str
    norm: tuple[str, ...] = ()
    basis_in: str = FIXED
    basis_out: str = FIXED
    role: str = "linear"  # linear | embedding


@dataclass(frozen=True)
class Vector:
    """A 1-D tensor: a norm's gain, a LayerNorm bias, the router's correction bias."""

    name: str
    size: str
    role: str  # norm | layernorm | layernorm_bias | router_bias


@dataclass(frozen=True)
class Subgraph:
    """A pair between which a per-channel scale can move: `source` is divided by it, `targets` are multiplied."""

    kind: str  # norm-linear | ov | up-down
    source: str
    targets: tuple[str, ...]


_ATTENTION: tuple[Linear | Vector, ...] = (
    Vector("input_layernorm", "hidden", "norm"),
    Linear("self_attn.q_a_proj", "q_lora", "hidden", ("input_layernorm",), HIDDEN, Q_LORA),
    Linear("self_attn.kv_a_proj_with_mqa", "kv_lora_rope", "hidden", ("input_layernorm",), HIDDEN, KV_LORA_ROPE),
    Vector("self_attn.q_a_layernorm", "q_lora", "norm"),
    Vector("self_attn.kv_a_layernorm", "kv_lora", "norm"),
    Linear("self_attn.q_b_proj", "heads_qk", "q_lora", ("self_attn.q_a_layernorm",), Q_LORA),
    Linear("self_attn.kv_b_proj", "heads_nope_v", "kv_lora", ("self_attn.kv_a_layernorm",), KV_LORA, HEADS_NOPE_V),
    Linear("self_attn.o_proj", "hidden", "heads_v", (), HEADS_V, HIDDEN),
    Vector("post_attention_layernorm", "hidden", "norm"),
)
_INDEXER: tuple[Linear | Vector, ...] = (
    Linear("self_attn.indexer.wq_b", "index_heads", "q_lora", ("self_attn.q_a_layernorm",), Q_LORA),
    Linear("self_attn.indexer.wk", "index_head", "hidden", ("input_layernorm",), HIDDEN),
    Linear("self_attn.indexer.weights_proj", "index_n_heads", "hidden", ("input_layernorm",), HIDDEN),
    Vector("self_attn.indexer.k_norm", "index_head", "layernorm"),
    Vector("self_attn.indexer.k_norm", "index_head", "layernorm_bias"),
)
_ROUTER: tuple[Linear | Vector, ...] = (
    Linear("mlp.gate", "experts", "hidden", ("post_attention_layernorm",), HIDDEN),
    Vector("mlp.gate", "experts", "router_bias"),
)


def _mlp(prefix: str, width: str) -> tuple[Linear, ...]:
    norm = ("post_attention_layernorm",)
    return (
        Linear(f"{prefix}.gate_proj", width, "hidden", norm, HIDDEN),
        Linear(f"{prefix}.up_proj", width, "hidden", norm, HIDDEN),
        Linear(f"{prefix}.down_proj", "hidden", width, (), FIXED, HIDDEN),
    )


_MTP: tuple[Linear | Vector, ...] = (
    Vector("enorm", "hidden", "norm"),
    Vector("hnorm", "hidden", "norm"),
    Linear("eh_proj", "hidden", "hidden_pair", ("enorm", "hnorm"), HIDDEN_PAIR, HIDDEN),
    Linear("embed_tokens", "vocab", "hidden", (), HIDDEN, role="embedding"),
    Vector("shared_head.norm", "hidden", "norm"),
    Linear("shared_head.head", "vocab", "hidden", ("shared_head.norm",), HIDDEN),
)
GLOBAL: tuple[Linear | Vector, ...] = (
    Linear("model.embed_tokens", "vocab", "hidden", (), HIDDEN, role="embedding"),
    Vector("model.norm", "hidden", "norm"),
    Linear("lm_head", "vocab", "hidden", ("model.norm",), HIDDEN),
)
#: What an MTP layer computes its input with, besides the embedding.
MTP_INPUT = ("enorm", "hnorm", "eh_proj")
#: MTP tensors a source may leave out, and the main-model tensor they are copies of.
MTP_COPIES = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
#: Linears that no reader of the format loads quantized, and why.
WHY_FLOAT = {
    "self_attn.kv_b_proj": "it is split into W_UK and W_UV at load",
    "self_attn.indexer.wk": "vLLM fuses it with weights_proj, unquantized",
    "self_attn.indexer.weights_proj": "vLLM fuses it with wk, unquantized",
    "mlp.gate": "the router has no quantized implementation",
    "embed_tokens": "embeddings have no quantized implementation",
    "lm_head": "the output head has no quantized implementation",
    "shared_head.head": "the output head has no quantized implementation",
}
#: Linears the quantizer leaves as they are.
ALWAYS_FLOAT = (*WHY_FLOAT, "eh_proj", "model.embed_tokens")
#: vLLM's fused modules and the linears inside each, by the last part of their names: those that may be quantized, and
#: one that may not.
FUSED_MODULES = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
FUSED_FLOAT_MODULES = {"wk_weights_proj": ("wk", "weights_proj")}
#: Linears of a routed expert, in the order of vLLM's w13 and w2.
EXPERT_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
#: Linears vLLM fuses into one module: all of a group must have one type.
FUSED = (
    ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
)
#: Its first group, the two that read the attention's normalised input: fused, they share one static input scale.
FUSED_DOWN_PROJECTIONS = FUSED[0]
#: Query projections that one operator takes, the second for what the first is: both FLOAT, or neither.
#: Source: vllm-ascend 0.30.0rc2 `attention/sfa_v1.py`, `_process_weights_for_fused_prolog_v3`.
QUERY_PROJECTIONS = ("self_attn.q_a_proj", "self_attn.q_b_proj")


def sizes(config: ModelConfig) -> dict[str, int]:
    """The numbers behind the size names used in the table."""
    c = config
    return {
        "hidden": c.hidden_size,
        "hidden_pair": 2 * c.hidden_size,
        "q_lora": c.q_lora_rank,
        "kv_lora": c.kv_lora_rank,
        "kv_lora_rope": c.kv_lora_rank + c.qk_rope_head_dim,
        "heads_qk": c.num_attention_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim),
        "heads_nope_v": c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim),
        "heads_v": c.num_attention_heads * c.v_head_dim,
        "index_heads": c.index_n_heads * c.index_head_dim,
        "index_head": c.index_head_dim,
        "index_n_heads": c.index_n_heads,
        "inter": c.intermediate_size,
        "shared_inter": c.moe_intermediate_size * c.n_shared_experts,
        "moe_inter": c.moe_intermediate_size,
        "experts": c.n_routed_experts,
        "vocab": c.vocab_size,
    }


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def indexer_readers(config: ModelConfig, layer: int) -> int:
    """How many layers attend to what this layer's indexer chose: itself, and those behind it that share it."""
    if not config.has_indexer(layer):
        return 0
    behind = config.indexer_types[layer + 1 :]
    return 1 + next((number for number, kind in enumerate(behind) if kind == "full"), len(behind))


def expert_prefix(expert: int) -> str:
    return f"mlp.experts.{expert}"


def expert_linears(expert: int) -> tuple[Linear, ...]:
    """gate_proj, up_proj, down_proj of one routed expert, names relative to the layer."""
    return _mlp(expert_prefix(expert), "moe_inter")


def backbone(config: ModelConfig, layer: int) -> tuple[Linear | Vector, ...]:
    """Everything of one layer except its routed experts."""
    parts = _ATTENTION
    if config.has_indexer(layer):
        parts += _INDEXER
    if config.is_moe(layer):
        parts += _ROUTER + _mlp("mlp.shared_experts", "shared_inter")
    else:
        parts += _mlp("mlp", "inter")
    if config.is_mtp(layer):
        parts += _MTP
    return parts


def layer_parts(config: ModelConfig, layer: int) -> Iterator[Linear | Vector]:
    """Everything of one layer, routed experts last."""
    yield from backbone(config, layer)
    if config.is_moe(layer):
        for expert in range(config.n_routed_experts):
            yield from expert_linears(expert)


def fused_groups(config: ModelConfig, layer: int) -> Iterator[tuple[str, ...]]:
    """Modules of one layer, by full name, that the engine fuses into one or judges by one of them.

    Of the routed experts it reads expert 0's type only.
    """
    prefix = layer_prefix(layer)
    own = {part.name for part in backbone(config, layer)}
    for group in FUSED:
        if own.issuperset(group):
            yield tuple(prefix + name for name in group)
    if config.is_moe(layer):
        yield tuple(prefix + p.name for e in range(config.n_routed_experts) for p in expert_linears(e))


def all_parts(config: ModelConfig) -> Iterator[tuple[str, Linear | Vector]]:
    """`(prefix, part)` of the whole model; the full module name is `prefix + part.name`."""
    for part in GLOBAL:
        yield "", part
    for layer in range(config.num_layers_with_mtp):
        for part in layer_parts(config, layer):
            yield layer_prefix(layer), part


def tensor_name(part: Linear | Vector) -> str:
    """Name of the part's tensor, relative like the part's own name."""
    suffix = {"layernorm_bias": "bias", "router_bias": "e_score_correction_bias"}.get(part.role, "weight")
    return f"{part.name}.{suffix}"


def find(parts: Iterable[Linear | Vector], name: str) -> Linear | Vector:
    """The first part of that name."""
    return next(part for part in parts if part.name == name)


def input_readers(parts: Iterable[Linear | Vector]) -> dict[str, str]:
    """Every linear's name -> the first linear that reads the same normalised input (itself if none does).

    The first one runs for every token; `indexer.wq_b` does not in sequences shorter than `index_topk`.
    """
    first: dict[tuple[str, ...], str] = {}
    found = {}
    for part in parts:
        if isinstance(part, Linear):
            found[part.name] = first.setdefault(part.norm, part.name) if part.norm else part.name
    return found


def is_table(part: Linear | Vector) -> bool:
    """Whether a part has one row per vocabulary entry: worked on in blocks of rows, never held whole."""
    return isinstance(part, Linear) and part.out == "vocab"


def shape(part: Linear | Vector, size: dict[str, int]) -> tuple[int, ...]:
    return (size[part.out], size[part.inp]) if isinstance(part, Linear) else (size[part.size],)


def subgraphs(config: ModelConfig, layer: int) -> tuple[Subgraph, ...]:
    """Smoothing pairs of one layer (without routed experts), in the order they are applied."""
    read_hidden: tuple[str, ...] = ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa")
    read_q_lora: tuple[str, ...] = ("self_attn.q_b_proj",)
    if config.has_indexer(layer):
        read_hidden += ("self_attn.indexer.wk", "self_attn.indexer.weights_proj")
        read_q_lora += ("self_attn.indexer.wq_b",)
    mlp = "mlp.shared_experts" if config.is_moe(layer) else "mlp"
    return (
        Subgraph("up-down", f"{mlp}.up_proj", (f"{mlp}.down_proj",)),
        Subgraph("ov", "self_attn.kv_b_proj", ("self_attn.o_proj",)),
        Subgraph("norm-linear", "input_layernorm", read_hidden),
        Subgraph("norm-linear", "self_attn.q_a_layernorm", read_q_lora),
    )


def expert_subgraph(expert: int) -> Subgraph:
    prefix = expert_prefix(expert)
    return Subgraph("up-down", f"{prefix}.up_proj", (f"{prefix}.down_proj",))


def source_rows(config: ModelConfig, subgraph: Subgraph) -> list[int] | None:
    """Rows of the source weight that carry the scale, in the order of the target's columns; None means all.

    `ov`: only the V rows of each head of kv_b_proj; its K rows feed the scores, not o_proj.
    """
    if subgraph.kind != "ov":
        return None
    per_head = config.qk_nope_head_dim + config.v_head_dim
    starts = range(config.qk_nope_head_dim, config.num_attention_heads * per_head, per_head)
    return [row for start in starts for row in range(start, start + config.v_head_dim)]
