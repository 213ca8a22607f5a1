"""A random GLM-5.3-Flash of every layer kind, with vision tower, MTP layer, tokenizer and processor (2 MB, 0.2 s)."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from tests.support.tiny_model import FP8_KEYS, tiny_config, write_random_model

PROCESSOR = {
    "image_processor": {"image_processor_type": "Glm5NextImageProcessor"},
    "processor_class": "Glm5NextProcessor",
}
#: msModelSlim's spelling of some names.
_MSMODELSLIM = (
    (r"\.self_attn\.(f_[ab]_proj|dt_bias|A_log)", r".self_attn.forget_gate.\1"),
    (r"\.hc_(attn|ffn)_", r".\1_hc."),
)

#: Keys of GLM-5's tiny config.json that Flash's text_config does not have.
_NOT_IN_FLASH = (
    "architectures", "rope_parameters", "rope_interleave", "indexer_rope_interleave", "attention_dropout",
    "moe_layer_freq", "initializer_range", "use_cache",
)  # fmt: skip
_TEXT: dict[str, Any] = tiny_config(**dict.fromkeys(_NOT_IN_FLASH)) | {
    "model_type": "glm5_next_text",
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "deepseek_sparse_attention", "linear_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "indexer_types": ["full"] * 4,
    "linear_attn_config": {
        "num_heads": 2, "head_dim": 128, "gate_lower_bound": -5, "short_conv_kernel_size": 4,
        "kda_layers": [0, 2, 3], "full_attn_layers": [1],
    },
    "qk_rope_head_dim": 0,
    "qk_head_dim": 16,
    "head_dim": 0,
    "index_kpool": 4,
    "index_kpool_always_select_tail": True,
    "index_kpool_compress": True,
    "hc_mult": 4,
    "hc_eps": 1e-6,
    "hc_sinkhorn_iters": 20,
    "mhc": True,
    "mla_use_nope": True,
    "swiglu_limit": 10,
}  # fmt: skip
_VISION: dict[str, Any] = {
    "model_type": "glm5_next_vision", "depth": 2, "hidden_size": 32, "num_heads": 2, "in_channels": 3,
    "image_size": 28, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 64,
    "intermediate_size": 48, "projection_intermediate_size": 80, "rms_norm_eps": 1e-5, "attention_bias": True,
    "hidden_act": "silu", "swiglu_limit": 10,
}  # fmt: skip


def tiny_flash_config(**overrides: Any) -> dict[str, Any]:
    """config.json of the tiny Flash; `overrides` replace keys of `text_config`, None removes one."""
    return {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "image_token_id": 300,
        "video_token_id": 301,
        "tie_word_embeddings": False,
        "text_config": {key: value for key, value in (_TEXT | overrides).items() if value is not None},
        "vision_config": _VISION,
    }


def with_floats(checkpoint: Path) -> Path:
    """Write some integers of config.json as 10.0: transformers 5.19, and with it SGLang, refuses integers there."""
    path = checkpoint / "config.json"
    path.write_text(re.sub(r'("(?:swiglu_limit|gate_lower_bound)": -?\d+)(?=[,\s}])', r"\1.0", path.read_text()))
    return checkpoint


def as_msmodelslim(name: str) -> str:
    """Return a tensor's name as msModelSlim writes it."""
    for pattern, replacement in _MSMODELSLIM:
        name = re.sub(pattern, replacement, name)
    return name


def write_tiny_flash(
    directory: Path, *, dtype: str = "bfloat16", shards: int = 1, msmodelslim: bool = False, **overrides: Any
) -> Path:
    """Write a checkpoint into `directory` (created) and return it.

    Args:
        dtype: as `write_tiny_model`. msmodelslim: with its names. overrides: keys of `text_config`.
    """
    config = tiny_flash_config(**overrides)
    if dtype == "fp8":
        config["quantization_config"] = FP8_KEYS | {"modules_to_not_convert": ["lm_head", "model.visual"]}
    elif dtype != "bfloat16":
        config["text_config"]["dtype"] = dtype
    spelled = as_msmodelslim if msmodelslim else str
    write_random_model(directory, config, dtype=dtype, shards=shards, spelled=spelled)
    (directory / "processor_config.json").write_text(json.dumps(PROCESSOR))
    return directory


def rename_as_msmodelslim(checkpoint: Path, out: Path) -> Path:
    """Copy a quantized checkpoint of one shard to `out` with msModelSlim's names, without our provenance."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(checkpoint, out)
    (out / "glm5_ascend_provenance.json").unlink()
    (shard,) = out.glob("*.safetensors")
    save_file({as_msmodelslim(name): tensor for name, tensor in load_file(shard).items()}, shard, {"format": "pt"})
    index = json.loads((out / "model.safetensors.index.json").read_text())
    index["weight_map"] = {as_msmodelslim(name): file for name, file in index["weight_map"].items()}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    path = out / "quant_model_description.json"
    path.write_text(json.dumps({as_msmodelslim(key): kind for key, kind in json.loads(path.read_text()).items()}))
    return out
