"""GLM-5.3-Flash (`glm5_next`) as a `ModelSpec`: linear attention (KDA) and sparse attention, four residual streams.

Source: transformers 5.19 `glm5_next`, vllm-ascend 0.30.0rc2 `models/glm5next/` (facts, not code). No linear has a
basis yet: rotation would have to reach the streams' maps and the vision merger, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from glm5_ascend.model import glm5
from glm5_ascend.model.spec import Block, Linear, ModelSpec, Parameter, Tower, Vector, Weight

if TYPE_CHECKING:
    from glm5_ascend.model.config import ModelConfig

_LANGUAGE = "model.language_model."


def _mlp(prefix: str, width: str) -> tuple[Linear, ...]:
    norm = ("post_attention_layernorm",)
    return (
        Linear(f"{prefix}gate_proj", width, "hidden", norm),
        Linear(f"{prefix}up_proj", width, "hidden", norm),
        Linear(f"{prefix}down_proj", "hidden", width),
    )


_NORMS: tuple[Weight, ...] = (
    Vector("input_layernorm", "hidden", "norm"),
    Vector("post_attention_layernorm", "hidden", "norm"),
)
_INPUT = ("input_layernorm",)
_SPARSE: tuple[Weight, ...] = (
    Linear("self_attn.q_a_proj", "q_lora", "hidden", _INPUT),
    Linear("self_attn.kv_a_proj_with_mqa", "kv_lora", "hidden", _INPUT),
    Vector("self_attn.q_a_layernorm", "q_lora", "norm"),
    Vector("self_attn.kv_a_layernorm", "kv_lora", "norm"),
    Linear("self_attn.q_b_proj", "heads_qk", "q_lora", ("self_attn.q_a_layernorm",)),
    Linear("self_attn.kv_b_proj", "heads_nope_v", "kv_lora", ("self_attn.kv_a_layernorm",)),
    Linear("self_attn.o_proj", "hidden", "heads_v"),
    Linear("self_attn.indexer.wq_b", "index_heads", "q_lora", ("self_attn.q_a_layernorm",)),
    Linear("self_attn.indexer.wk", "index_head", "hidden", _INPUT),
    Linear("self_attn.indexer.weights_proj", "index_n_heads", "hidden", _INPUT),
    Vector("self_attn.indexer.k_norm", "index_head", "layernorm"),
    Vector("self_attn.indexer.k_norm", "index_head", "layernorm_bias"),
    Parameter("self_attn.indexer.index_kpool_compress_ape", ("index_kpool", "index_head")),
    Parameter("self_attn.indexer.index_kpool_compress_gate", ("index_head", "hidden")),
)


def _kda(name: str, out: str, inp: str, norm: tuple[str, ...] = ()) -> Linear:
    why = "vllm-ascend computes linear attention (KDA) in bf16 only"
    return Linear(f"self_attn.{name}", out, inp, norm, why_float=why)


_LINEAR_ATTENTION: tuple[Weight, ...] = (
    _kda("q_proj", "linear_width", "hidden", _INPUT),
    _kda("k_proj", "linear_width", "hidden", _INPUT),
    _kda("v_proj", "linear_width", "hidden", _INPUT),
    _kda("b_proj", "linear_heads", "hidden", _INPUT),
    _kda("f_a_proj", "linear_head", "hidden", _INPUT),
    _kda("g_a_proj", "linear_head", "hidden", _INPUT),
    _kda("f_b_proj", "linear_width", "linear_head"),
    _kda("g_b_proj", "linear_width", "linear_head"),
    _kda("o_proj", "hidden", "linear_width"),
    Vector("self_attn.o_norm", "linear_head", "layernorm"),
    Parameter("self_attn.A_log", ("linear_heads",)),
    Parameter("self_attn.dt_bias", ("linear_width",)),
    *(Parameter(f"self_attn.{side}_conv1d.weight", ("linear_width", 1, "linear_conv")) for side in "qkv"),
)
_STREAMS: tuple[Weight, ...] = tuple(
    Parameter(f"hc_{half}_{name}", dims)
    for half in ("attn", "ffn")
    for name, dims in (("fn", ("hc_maps", "hc_hidden")), ("base", ("hc_maps",)), ("scale", (3,)))
)
_MOE: tuple[Weight, ...] = (
    Linear("mlp.gate", "experts", "hidden", ("post_attention_layernorm",)),
    Vector("mlp.gate", "experts", "router_bias"),
    *_mlp("mlp.shared_experts.", "shared_inter"),
)
_MTP: tuple[Weight, ...] = (
    Vector("enorm", "hidden", "norm"),
    Vector("hnorm", "hidden", "norm"),
    Linear("eh_proj", "hidden", "hidden_pair", ("enorm", "hnorm")),
    Linear("embed_tokens", "vocab", "hidden", role="embedding"),
    Vector("shared_head.norm", "hidden", "norm"),
    Linear("shared_head.head", "vocab", "hidden", ("shared_head.norm",)),
)


def _with_bias(name: str, *dims: str | int) -> tuple[Parameter, ...]:
    return Parameter(f"{name}.weight", dims), Parameter(f"{name}.bias", dims[:1])


_TOWER = Tower(
    prefix="model.visual.",
    depth="vision_depth",
    block=(
        Parameter("norm1.weight", ("vision_hidden",)),
        Parameter("norm2.weight", ("vision_hidden",)),
        *_with_bias("attn.qkv", "vision_qkv", "vision_hidden"),
        *_with_bias("attn.proj", "vision_hidden", "vision_hidden"),
        Parameter("attn.q_norm.weight", ("vision_head",)),
        Parameter("attn.k_norm.weight", ("vision_head",)),
        *_with_bias("mlp.gate_proj", "vision_inter", "vision_hidden"),
        *_with_bias("mlp.up_proj", "vision_inter", "vision_hidden"),
        *_with_bias("mlp.down_proj", "vision_hidden", "vision_inter"),
    ),
    others=(
        *_with_bias(
            "patch_embed.proj",
            *("vision_hidden", "vision_channels", "vision_frames", "vision_patch", "vision_patch"),
        ),
        Parameter("post_layernorm.weight", ("vision_hidden",)),
        *_with_bias("downsample", "vision_out", "vision_hidden", "vision_merge", "vision_merge"),
        Parameter("merger.proj.weight", ("vision_out", "vision_out")),
        *_with_bias("merger.post_projection_norm", "vision_out"),
        Parameter("merger.gate_proj.weight", ("vision_projection", "vision_out")),
        Parameter("merger.up_proj.weight", ("vision_projection", "vision_out")),
        Parameter("merger.down_proj.weight", ("vision_out", "vision_projection")),
    ),
)


def _sizes(c: ModelConfig) -> dict[str, int]:
    streams, vision = c.hc_mult, dict(c.vision)
    return {
        **glm5.sizes(c),
        "index_kpool": c.index_kpool,
        "linear_heads": c.linear_num_heads,
        "linear_head": c.linear_head_dim,
        "linear_width": c.linear_num_heads * c.linear_head_dim,
        "linear_conv": c.linear_conv_kernel_dim,
        "hc_maps": (2 + streams) * streams,
        "hc_hidden": streams * c.hidden_size,
        "vision_depth": vision["depth"],
        "vision_hidden": vision["hidden_size"],
        "vision_qkv": 3 * vision["hidden_size"],
        "vision_head": vision["hidden_size"] // vision["num_heads"],
        "vision_inter": vision["intermediate_size"],
        "vision_channels": vision["in_channels"],
        "vision_frames": vision["temporal_patch_size"],
        "vision_patch": vision["patch_size"],
        "vision_merge": vision["spatial_merge_size"],
        "vision_out": vision["out_hidden_size"],
        "vision_projection": vision["projection_intermediate_size"],
    }


def _layer_kinds(config: ModelConfig, layer: int) -> tuple[str, ...]:
    kinds = ["norms", config.attention_kind(layer), "moe" if config.is_moe(layer) else "dense"]
    kinds.append("mtp" if config.is_mtp(layer) else "streams")
    return tuple(kinds)


GLM5_NEXT = ModelSpec(
    model_type="glm5_next",
    architecture="Glm5NextForConditionalGeneration",
    label="GLM-5.3-Flash",
    sizes=_sizes,
    global_weights=(
        Linear(f"{_LANGUAGE}embed_tokens", "vocab", "hidden", role="embedding"),
        Vector(f"{_LANGUAGE}norm", "hidden", "norm"),
        Linear("lm_head", "vocab", "hidden", (f"{_LANGUAGE}norm",)),
    ),
    tower=_TOWER,
    layer_kinds=_layer_kinds,
    blocks=(
        Block("norms", _NORMS),
        Block("sparse", _SPARSE),
        Block("linear", _LINEAR_ATTENTION),
        Block("streams", _STREAMS),
        Block("moe", _MOE),
        Block("dense", _mlp("mlp.", "inter")),
        Block("mtp", _MTP),
    ),
    expert=_mlp("", "moe_inter"),
    # The clamp lies between up_proj and down_proj: no scale can move from one to the other.
    subgraphs_of_layer=(),
    subgraph_of_expert=None,
    bases={},
    text_config="text_config",
    vision_config="vision_config",
    fixed_keys={
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "qk_rope_head_dim": 0,
        "mla_use_nope": True,
        "index_kpool_always_select_tail": True,
        "index_kpool_compress": True,
        "mhc": True,
    },
    defaults={
        "vocab_size": 154880, "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 2048,
        "num_hidden_layers": 45, "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 256, "qk_rope_head_dim": 0, "v_head_dim": 256,
        "n_routed_experts": 288, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1,
        "norm_topk_prob": True, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        "index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048, "index_kpool": 16,
        "index_kpool_always_select_tail": True, "linear_head_dim": 128, "linear_num_heads": 64,
        "linear_conv_kernel_dim": 4, "linear_lower_bound": -5.0, "hc_mult": 4, "hc_eps": 1e-6, "hc_sinkhorn_iters": 20,
        "swiglu_limit": 10.0, "rms_norm_eps": 1e-5, "hidden_act": "silu", "max_position_embeddings": 1048576,
    },
    vision_defaults={
        "depth": 24, "hidden_size": 1024, "num_heads": 16, "in_channels": 3, "image_size": 336, "patch_size": 14,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 1536, "intermediate_size": 4096,
        "projection_intermediate_size": 10240, "swiglu_limit": 10.0, "attention_bias": True, "hidden_act": "silu",
    },
    groups={
        "linear_attn_config": {
            "head_dim": "linear_head_dim", "num_heads": "linear_num_heads",
            "short_conv_kernel_size": "linear_conv_kernel_dim", "gate_lower_bound": "linear_lower_bound",
        },
    },
    more_numbers=("linear_lower_bound", "hc_eps", "swiglu_limit"),
    dense_key=None,
    shared_indexers=False,
    more_sizes=(
        "index_kpool", "linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim", "hc_mult", "hc_sinkhorn_iters",
    ),
    attention_kinds={
        "linear_attention": "linear", "deepseek_sparse_attention": "sparse", "indexed_attention": "sparse",
        "full_attention": "sparse",
    },
    # msModelSlim's names, which vllm-ascend reads, too (`hf_to_vllm_mapper`).
    spellings={".self_attn.forget_gate.": ".self_attn.", ".attn_hc.": ".hc_attn_", ".ffn_hc.": ".hc_ffn_"},
    type_aliases=(_LANGUAGE, "model."),
    sglang_keys=(("first_k_dense_replace",), ("mhc",), ("linear_attn_config", "kda_layers")),
    processor_files=("processor_config.json", "preprocessor_config.json"),
    token_keys=(
        "image_token_id", "video_token_id", "image_start_token_id", "image_end_token_id", "video_start_token_id",
        "video_end_token_id",
    ),
    mtp_input=("enorm", "hnorm", "eh_proj"),
    mtp_copies={"embed_tokens": f"{_LANGUAGE}embed_tokens", "shared_head.head": "lm_head"},
    why_float=glm5.WHY_FLOAT,
    always_float=(*glm5.WHY_FLOAT, "eh_proj", f"{_LANGUAGE}embed_tokens"),
    fused_modules={
        "gate_up_proj": ("gate_proj", "up_proj"),
        "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    },
    fused_float_modules={
        "wk_weights_proj": ("wk", "weights_proj"),
        "in_proj_qkvbfg_a": ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj"),
    },
    fused=(
        glm5.DOWN_PROJECTIONS,
        ("mlp.gate_proj", "mlp.up_proj"),
        ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    ),
    down_projections=glm5.DOWN_PROJECTIONS,
    query_projections=("self_attn.q_a_proj", "self_attn.q_b_proj"),
    embedding=f"{_LANGUAGE}embed_tokens",
    final_norm=f"{_LANGUAGE}norm",
    layers_prefix=f"{_LANGUAGE}layers.",
    vllm_ascend="vllm-ascend 0.30",
    lacks={
        "vLLM on a CPU": "vLLM 0.32 computes linear attention (KDA) and the pooled indexer by GPU kernels only",
        "--engine msmodelslim": "msModelSlim 26.1.0 has no adapter for it",
    },
)  # fmt: skip
