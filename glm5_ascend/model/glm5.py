"""GLM-5, 5.1, 5.2 and 5.3 (`glm_moe_dsa`) as an `Architecture`.

Source: transformers 5.19 `glm_moe_dsa`, msModelSlim 26.1.0 `model/glm_5/quarot.py` (facts, not code).
"""

from __future__ import annotations

from glm5_ascend.model.sizes import ModelSizes
from glm5_ascend.model.spec import (
    FIXED,
    HIDDEN,
    HIDDEN_PAIR,
    Architecture,
    Basis,
    Block,
    Linear,
    Subgraph,
    Vector,
    Weight,
)

Q_LORA = "q_lora"
KV_LORA = "kv_lora"
KV_LORA_ROPE = "kv_lora_rope"  # latent rotated, RoPE part untouched
HEADS_NOPE_V = "heads_nope_v"  # per head: K rows untouched, V rows rotated
HEADS_V = "heads_v"


def mlp(prefix: str, width: str) -> tuple[Linear, ...]:
    norm = ("post_attention_layernorm",)
    return (
        Linear(f"{prefix}gate_proj", width, "hidden", norm, HIDDEN),
        Linear(f"{prefix}up_proj", width, "hidden", norm, HIDDEN),
        Linear(f"{prefix}down_proj", "hidden", width, (), FIXED, HIDDEN),
    )


ATTENTION: tuple[Weight, ...] = (
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
INDEXER: tuple[Weight, ...] = (
    Linear("self_attn.indexer.wq_b", "index_heads", "q_lora", ("self_attn.q_a_layernorm",), Q_LORA),
    Linear("self_attn.indexer.wk", "index_head", "hidden", ("input_layernorm",), HIDDEN),
    Linear("self_attn.indexer.weights_proj", "index_n_heads", "hidden", ("input_layernorm",), HIDDEN),
    Vector("self_attn.indexer.k_norm", "index_head", "layernorm"),
    Vector("self_attn.indexer.k_norm", "index_head", "layernorm_bias"),
)
ROUTER: tuple[Weight, ...] = (
    Linear("mlp.gate", "experts", "hidden", ("post_attention_layernorm",), HIDDEN),
    Vector("mlp.gate", "experts", "router_bias"),
)
MTP: tuple[Weight, ...] = (
    Vector("enorm", "hidden", "norm"),
    Vector("hnorm", "hidden", "norm"),
    Linear("eh_proj", "hidden", "hidden_pair", ("enorm", "hnorm"), HIDDEN_PAIR, HIDDEN),
    Linear("embed_tokens", "vocab", "hidden", (), HIDDEN, role="embedding"),
    Vector("shared_head.norm", "hidden", "norm"),
    Linear("shared_head.head", "vocab", "hidden", ("shared_head.norm",), HIDDEN),
)
DOWN_PROJECTIONS = ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa")


def sizes(c: ModelSizes) -> dict[str, int]:
    """Return the names of dimensions in the tables of GLM-5's weights, and their sizes."""
    return {
        "hidden": c.hidden_size,
        "hidden_pair": 2 * c.hidden_size,
        "q_lora": c.q_lora_rank,
        "kv_lora": c.kv_lora_rank,
        "kv_lora_rope": c.kv_lora_rank + c.qk_rope_head_dim,
        "nope": c.qk_nope_head_dim,
        "v_head": c.v_head_dim,
        "nope_v": c.qk_nope_head_dim + c.v_head_dim,
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


def _blocks_of_layer(config: ModelSizes, layer: int) -> tuple[str, ...]:
    indexer = ("indexer",) if config.has_indexer(layer) else ()
    return ("attention", *indexer, *mlp_blocks(config, layer))


def mlp_blocks(config: ModelSizes, layer: int) -> tuple[str, ...]:
    """Blocks of a layer behind its attention."""
    mlp = ("router", "shared experts") if config.is_moe(layer) else ("dense MLP",)
    return (*mlp, "MTP layer") if config.is_mtp(layer) else mlp


GLM5 = Architecture(
    model_type="glm_moe_dsa",
    architecture="GlmMoeDsaForCausalLM",
    sizes=sizes,
    global_weights=(
        Linear("model.embed_tokens", "vocab", "hidden", (), HIDDEN, role="embedding"),
        Vector("model.norm", "hidden", "norm"),
        Linear("lm_head", "vocab", "hidden", ("model.norm",), HIDDEN),
    ),
    blocks_of_layer=_blocks_of_layer,
    blocks=(
        Block("attention", ATTENTION),
        Block("indexer", INDEXER),
        Block("router", ROUTER),
        Block("shared experts", mlp("mlp.shared_experts.", "shared_inter")),
        Block("dense MLP", mlp("mlp.", "inter")),
        Block("MTP layer", MTP),
    ),
    expert=mlp("", "moe_inter"),
    subgraphs_of_layer=(
        Subgraph("up-down", "mlp.shared_experts.up_proj", ("mlp.shared_experts.down_proj",)),
        Subgraph("up-down", "mlp.up_proj", ("mlp.down_proj",)),
        Subgraph("ov", "self_attn.kv_b_proj", ("self_attn.o_proj",)),
        Subgraph(
            "norm-linear",
            "input_layernorm",
            (*DOWN_PROJECTIONS, "self_attn.indexer.wk", "self_attn.indexer.weights_proj"),
        ),
        Subgraph("norm-linear", "self_attn.q_a_layernorm", ("self_attn.q_b_proj", "self_attn.indexer.wq_b")),
    ),
    subgraph_of_expert=Subgraph("up-down", "up_proj", ("down_proj",)),
    bases={
        HIDDEN: Basis(HIDDEN, "hidden"),
        HIDDEN_PAIR: Basis(HIDDEN, "hidden"),
        Q_LORA: Basis(Q_LORA, 32, shifted=True),  # as msModelSlim 26.1.0
        KV_LORA: Basis(KV_LORA, "kv_lora"),
        KV_LORA_ROPE: Basis(KV_LORA, "kv_lora", period="kv_lora_rope"),
        HEADS_V: Basis(HEADS_V, "v_head"),
        HEADS_NOPE_V: Basis(HEADS_V, "v_head", offset="nope", period="nope_v"),
    },
    fixed_keys={
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "rope_interleave": True,
        "indexer_rope_interleave": True,
    },
    mtp_copies={"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"},
    other_names=(
        # transformers 5.1 had no module `indexer`.
        (r"\.self_attn\.(wq_b|wk|weights_proj|k_norm)\.", r".self_attn.indexer.\1."),
    ),
)
