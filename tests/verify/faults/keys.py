"""Faults in config.json and in the keys of quant_model_description.json that are no tensors."""

from __future__ import annotations

from tests.verify.faults.row import DESCRIPTION, Edit, Linked, Row, key, without

CONFIG = "config.json"
K = "description key"
C = "config.json"


def rope(name: str, value: object) -> Edit:
    def edit(ck: Linked) -> None:
        with ck.json(CONFIG) as config:
            config["rope_parameters"][name] = value

    return edit


def cache_of_a_layer(word: str) -> Edit:
    def edit(ck: Linked) -> None:
        key(DESCRIPTION, "indexer_quant_type", "INT8_DYNAMIC")(ck)
        key(DESCRIPTION, "model.layers.1.self_attn.indexer.quant_type", word)(ck)

    return edit


def mlp_layer_types_alone(ck: Linked) -> None:
    key(CONFIG, "mlp_layer_types", ["dense", "sparse", "sparse"])(ck)
    without(CONFIG, "first_k_dense_replace")(ck)


def as_float(*names: str) -> Edit:
    """Correct linears of layer 1, FLOAT."""

    def edit(ck: Linked) -> None:
        for module in (f"model.layers.1.self_attn.{name}" for name in names):
            weight = ck.read(f"{module}.weight").float() * ck.read(f"{module}.weight_scale").float()
            ck.retype(module, "FLOAT", {"weight": weight.bfloat16()})

    return edit


def key_prefix(before: str, after: str) -> Edit:
    """Other beginnings of the description's keys of tensors."""

    def edit(ck: Linked) -> None:
        with ck.json(DESCRIPTION) as content:
            keys = [name for name in content if name.startswith(before)]
            content |= {after + name.removeprefix(before): content.pop(name) for name in keys}

    return edit


ROWS = [
    Row(K, "without model.", key_prefix("model.", ""), "layers begin with 'layers.', the engine asks for 'model."),
    Row(K, "a wrapper", key_prefix("model.", "language_model.model."), "begin with 'language_model.model.layers"),
    Row(K, "another head", key_prefix("model.layers.", "transformer.layers."), "begin with 'transformer.layers"),
    # -- description
    Row(K, "q_b_proj alone FLOAT", as_float("q_b_proj"), "vllm-ascend 0.30 reads it as that type", "warning"),
    Row(K, "q_a_proj FLOAT, q_b_proj not", as_float("q_a_proj", "kv_a_proj_with_mqa"), "of decode nodes", "warning"),
    Row(K, "model_quant_type", key(DESCRIPTION, "model_quant_type", "W4A4"), "'W4A4', but the linears are"),
    Row(K, "model_quant_type 8", key(DESCRIPTION, "model_quant_type", 8), "model_quant_type is 8"),
    Row(K, "no model_quant_type", without(DESCRIPTION, "model_quant_type"), "model_quant_type is missing", "warning"),
    Row(K, "version 2", key(DESCRIPTION, "version", "2.0.0"), "version is '2.0.0'"),
    Row(K, "no version", without(DESCRIPTION, "version"), "version is missing"),
    Row(K, "group_size 256", key(DESCRIPTION, "group_size", 256), "group_size is 256"),
    Row(K, "no group_size", without(DESCRIPTION, "group_size"), "group_size is missing"),
    Row(K, "is_rot_used 1", key(DESCRIPTION, "is_rot_used", 1), "is_rot_used is 1"),
    Row(K, "is_rot_used false", key(DESCRIPTION, "is_rot_used", False), "rotated but is_rot_used is not true"),
    Row(K, "optional", key(DESCRIPTION, "optional", []), r"optional is \[\]"),
    Row(K, "metadata", key(DESCRIPTION, "metadata", "x"), "metadata is 'x'"),
    Row(K, "fa_quant_type", key(DESCRIPTION, "fa_quant_type", "FAKQuant"), "fa_k.scale"),
    Row(K, "kv_cache_type", key(DESCRIPTION, "kv_cache_type", "C8"), "kv_cache_scale"),
    Row(K, "indexer_quant_type", key(DESCRIPTION, "indexer_quant_type", "FP8"), "'FP8', expected 'INT8_DYNAMIC'"),
    Row(
        K, "indexer_quant_type without a layer", key(DESCRIPTION, "indexer_quant_type", "INT8_DYNAMIC"),
        "no layer has indexer.quant_type", "warning",
    ),
    Row(
        K, "a layer without indexer_quant_type",
        key(DESCRIPTION, "model.layers.1.self_attn.indexer.quant_type", "INT8_DYNAMIC"), "would not build its INT8",
    ),
    Row(K, "a layer's cache in another word", cache_of_a_layer("QK_INT8_DYNAMIC"), "expected 'INT8_DYNAMIC'"),
    Row(K, "a key of nothing", key(DESCRIPTION, "ascend_quant_method", "ascend"), "type 'ascend' is unknown"),
    # -- config.json
    Row(C, "dtype float16", key(CONFIG, "dtype", "float16"), "dtype is float16, but"),
    Row(C, "dtype int8", key(CONFIG, "dtype", "int8"), "no dtype that an engine runs in"),
    Row(C, "no dtype", without(CONFIG, "dtype"), "dtype is not given", "warning"),
    Row(C, "dtype and torch_dtype", key(CONFIG, "torch_dtype", "float32"), "dtype and torch_dtype disagree"),
    Row(C, "quantization_config", key(CONFIG, "quantization_config", {"quant_method": "fp8"}), "never open"),
    Row(C, "auto_map", key(CONFIG, "auto_map", {"AutoConfig": "x.Y"}), "auto_map names code"),
    Row(C, "no architectures", without(CONFIG, "architectures"), "architectures is None"),
    Row(C, "architectures", key(CONFIG, "architectures", ["GlmMoeDsaModel"]), "another model"),
    Row(C, "no scoring_func", without(CONFIG, "scoring_func"), "scoring_func is missing"),
    Row(C, "num_local_experts", key(CONFIG, "num_local_experts", 8), "num_local_experts is 8"),
    Row(C, "num_key_value_heads", key(CONFIG, "num_key_value_heads", 1), "num_key_value_heads is 1"),
    Row(C, "moe_layer_freq", key(CONFIG, "moe_layer_freq", 2), "moe_layer_freq is 2"),
    Row(C, "mlp_layer_types alone", mlp_layer_types_alone, "first_k_dense_replace is missing"),
    Row(C, "rope_scaling", key(CONFIG, "rope_scaling", {"type": "yarn", "factor": 40}), "rope_scaling is present"),
    Row(C, "rope_theta twice", key(CONFIG, "rope_theta", 1e6), "outside and"),
    Row(C, "partial_rotary_factor", rope("partial_rotary_factor", 0.5), "only a part would be rotated"),
    Row(C, "qk_head_dim", key(CONFIG, "qk_head_dim", 99), "qk_head_dim is 99", "warning"),
    Row(C, "eos_token_id", key(CONFIG, "eos_token_id", [100_000]), "the vocabulary has"),
    Row(C, "pad_token_id", key(CONFIG, "pad_token_id", -1), "pad_token_id is -1"),
    Row(
        C, "rope_theta of another model", rope("rope_theta", 8e6),
        r"differs from the source's in rope_parameters|were written", modes="hs",
    ),
]  # fmt: skip
