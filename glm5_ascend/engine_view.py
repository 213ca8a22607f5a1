"""How engines see each architecture: what they fuse, which modules they run in FLOAT only, and which keys they misread.

Facts about vLLM, vllm-ascend and SGLang; what a model is made of is `model.spec.Architecture`. Names of weights are
relative to a layer, except the global ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class EngineView:
    """One architecture in the engines.

    Attributes:
        why_float: linears that no engine runs quantized, and the reason.
        fused: linears of a layer that vLLM fuses into one module; all of a group must have one type.
        query_projections: two linears that one operator takes; both must be FLOAT or neither.
        dense_key: the key that vLLM reads instead of `mlp_layer_types`; None if it reads those.
        stated: keys that must have this value, because engines take another without them, and what they would compute.
        sglang_keys: paths of keys for which SGLang has another default than transformers, or none.
        type_aliases: (prefix of module names, what SGLang has in its place when it looks for a module's type).
        vllm_ascend: name of the first line of vllm-ascend (engine_lines.py) that loads it.
    """

    why_float: Mapping[str, str]
    fused: tuple[tuple[str, ...], ...] = (
        ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
        ("mlp.gate_proj", "mlp.up_proj"),
        ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    )
    # vllm-ascend 0.30.0rc2 `attention/sfa_v1.py`, `_process_weights_for_fused_prolog_v3`: the second is taken for the
    # type of the first.
    query_projections: tuple[str, str] = ("self_attn.q_a_proj", "self_attn.q_b_proj")
    dense_key: str | None = "first_k_dense_replace"
    stated: Mapping[str, tuple[object, str]] = field(default_factory=dict)
    sglang_keys: tuple[tuple[str, ...], ...] = ()
    type_aliases: tuple[str, str] = ("", "")
    vllm_ascend: str = "vllm-ascend 0.23"


#: vLLM's fused modules that may be quantized, and the linears in each, by last name.
FUSED_MODULES = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
_HEAD = "the output head has no quantized implementation"
_EMBEDDING = "embeddings have no quantized implementation"
_WHY_FLOAT = {
    "self_attn.kv_b_proj": "it is split into W_UK and W_UV at load",
    "self_attn.indexer.wk": "vLLM fuses it with weights_proj, unquantized",
    "self_attn.indexer.weights_proj": "vLLM fuses it with wk, unquantized",
    "mlp.gate": "the router has no quantized implementation",
    "eh_proj": "engines build the MTP layer's input projection unquantized",
    "embed_tokens": _EMBEDDING,
    "lm_head": _HEAD,
    "shared_head.head": _HEAD,
}
ENGINE_VIEWS = {
    "glm_moe_dsa": EngineView(
        why_float={**_WHY_FLOAT, "model.embed_tokens": _EMBEDDING},
        stated={
            "scoring_func": ("sigmoid", "vLLM would score experts by softmax"),
            "topk_method": ("noaux_tc", "vLLM would leave e_score_correction_bias out of the choice of experts"),
            "indexer_rope_interleave": (True, "vLLM would rotate halves in the indexer and choose other tokens"),
        },
    ),
    "glm5_next": EngineView(
        why_float={**_WHY_FLOAT, "model.language_model.embed_tokens": _EMBEDDING},
        dense_key=None,
        sglang_keys=(("first_k_dense_replace",), ("mhc",), ("linear_attn_config", "kda_layers")),
        type_aliases=("model.language_model.", "model."),
        vllm_ascend="vllm-ascend 0.30",
    ),
}
