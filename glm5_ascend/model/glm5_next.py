"""GLM-5.3-Flash (`glm5_next`) as an `Architecture`: linear attention (KDA) and sparse attention, four residual streams.

Source: transformers 5.19 `glm5_next`, vllm-ascend 0.30.0rc2 `models/glm5next/` (facts, not code). No linear has a
basis yet: rotation would have to reach the streams' maps and the vision merger, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from glm5_ascend.model import glm5
from glm5_ascend.model.sizes import ModelSizes
from glm5_ascend.model.spec import FIXED, Architecture, Block, Linear, Parameter, Tower, Vector, Weight

_LANGUAGE = "model.language_model."


def _unrotated(weights: Iterable[Weight]) -> tuple[Weight, ...]:
    """Weights of GLM-5 without the bases of their sides."""
    return tuple(
        replace(weight, basis_in=FIXED, basis_out=FIXED) if isinstance(weight, Linear) else weight for weight in weights
    )


_INPUT_NORM, *_SPARSE, _POST_NORM = _unrotated(glm5.ATTENTION)
_INPUT = ("input_layernorm",)
_INDEXER: tuple[Weight, ...] = (
    *_unrotated(glm5.INDEXER),
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


def _sizes(c: ModelSizes) -> dict[str, int]:
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


def _blocks_of_layer(config: ModelSizes, layer: int) -> tuple[str, ...]:
    attention = ("sparse attention", "indexer") if config.attention_kind(layer) == "sparse" else ("linear attention",)
    streams = () if config.is_mtp(layer) else ("residual streams",)
    return ("norms", *attention, *streams, *glm5.mlp_blocks(config, layer))


GLM5_NEXT = Architecture(
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
    blocks_of_layer=_blocks_of_layer,
    blocks=(
        Block("norms", (_INPUT_NORM, _POST_NORM)),
        Block("sparse attention", tuple(_SPARSE)),
        Block("indexer", _INDEXER),
        Block("linear attention", _LINEAR_ATTENTION),
        Block("residual streams", _STREAMS),
        Block("router", _unrotated(glm5.ROUTER)),
        Block("shared experts", _unrotated(glm5.mlp("mlp.shared_experts.", "shared_inter"))),
        Block("dense MLP", _unrotated(glm5.mlp("mlp.", "inter"))),
        Block("MTP layer", _unrotated(glm5.MTP)),
    ),
    expert=tuple(replace(linear, basis_in=FIXED, basis_out=FIXED) for linear in glm5.mlp("", "moe_inter")),
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
    fused_parameters={"self_attn.conv1d.weight": tuple(f"self_attn.{side}_conv1d.weight" for side in "qkv")},
    processor_files=("processor_config.json", "preprocessor_config.json"),
    token_keys=(
        "image_token_id", "video_token_id", "image_start_token_id", "image_end_token_id", "video_start_token_id",
        "video_end_token_id",
    ),
    mtp_copies={"embed_tokens": f"{_LANGUAGE}embed_tokens", "shared_head.head": "lm_head"},
    embedding=f"{_LANGUAGE}embed_tokens",
    final_norm=f"{_LANGUAGE}norm",
    layers_prefix=f"{_LANGUAGE}layers.",
)  # fmt: skip
