"""GLM-5's architecture, scaled down until the file fits a repository."""

from __future__ import annotations

from typing import Any

from .tokenizer import STOP_TOKENS, VOCAB_SIZE

INDEX_TOPK = 64
NORM_EPS = 1e-5
#: Another shape: five times as deep and narrow, to see how errors of rounding add up over layers.
DEEP: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "q_lora_rank": 64,
    "kv_lora_rank": 128,
    "index_n_heads": 8,
}


def demo_config(tokenizer: Any, **changes: Any) -> Any:
    """A `GlmMoeDsaConfig` with every key that transformers, vLLM and vLLM-Ascend read.

    Args:
        tokenizer: gives the ids of padding and of the three stop tokens.
        changes: other values for single keys (tests build smaller models with them).
    """
    from transformers import GlmMoeDsaConfig

    stops = [tokenizer.convert_tokens_to_ids(token) for token in STOP_TOKENS]
    values: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 192,
        "intermediate_size": 384,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_shared_experts": 1,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 96,
        "kv_lora_rank": 512,  # the real one: the fused attention kernels are built for it
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "index_n_heads": 16,  # fewer make exact ties at the top-k boundary
        "index_head_dim": 128,
        "index_topk": INDEX_TOPK,
        "rms_norm_eps": NORM_EPS,
        "max_position_embeddings": 2048,  # trained on rows of 384 tokens; sums stay right up to some 1000
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "tie_word_embeddings": False,
        "attention_bias": False,
        "hidden_act": "silu",
        "pad_token_id": stops[0],
        "bos_token_id": None,
        "eos_token_id": stops,
        "dtype": "bfloat16",
        # Read by vLLM or vLLM-Ascend, not declared by GlmMoeDsaConfig 5.19: without them other defaults apply.
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "rope_interleave": True,
        "indexer_rope_interleave": True,
        "num_nextn_predict_layers": 1,
        "ep_size": 1,
        "moe_layer_freq": 1,
    }
    values.update(changes)
    layers = values["num_hidden_layers"]
    dense = values["first_k_dense_replace"]
    values.setdefault("mlp_layer_types", ["dense"] * dense + ["sparse"] * (layers - dense))
    values.setdefault("indexer_types", ["full"] * layers)
    return GlmMoeDsaConfig(**values)


def mtp_config(config: Any) -> Any:
    """Add one layer to a config, so that transformers' decoder layer class can build layer L."""
    from transformers import GlmMoeDsaConfig

    values = config.to_dict()
    layers = values["num_hidden_layers"] + 1
    values["num_hidden_layers"] = layers
    for key, kind in (("mlp_layer_types", "sparse"), ("indexer_types", "full")):
        values[key] = [*values[key], kind]
    values["layer_types"] = None
    extended = GlmMoeDsaConfig(**values)
    extended._attn_implementation = "eager"
    return extended
