"""Writes the trained weights in the hub format: bf16, one tensor per expert, GLM-5's MTP layer under layer L."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm5_ascend.files.written import write_file

from .config import mtp_config
from .loading import load_tensors
from .outliers import save_tensors
from .trunk import MtpLayer

PROCESSOR = {
    "image_processor": {"image_processor_type": "Glm5NextImageProcessor", "patch_size": 14, "merge_size": 2},
    "processor_class": "Glm5NextProcessor",
}
GENERAL_KEYS = (
    "_name_or_path", "output_hidden_states", "output_attentions", "output_router_logits", "return_dict",
    "chunk_size_feed_forward", "is_encoder_decoder", "id2label", "label2id", "problem_type", "mlp_bias",
    "initializer_range",
)  # fmt: skip


def hub_tensors(model: Any, mtp: MtpLayer, folder: Path) -> dict[str, Tensor]:
    """Every tensor under its hub name; transformers writes the model with the MTP layer's block as its last layer."""
    whole = type(model)(mtp_config(model.config))
    whole.load_state_dict(model.state_dict(), strict=False)
    whole.model.layers[-1].load_state_dict(mtp.block.state_dict())
    whole.save_pretrained(folder)
    named, layer = load_tensors(folder), f"model.layers.{model.config.num_hidden_layers}"
    for name, weight in mtp.state_dict().items():
        if not name.startswith("block."):
            named[f"{layer}.{'shared_head.' if name == 'norm.weight' else ''}{name}"] = weight
    named[f"{layer}.embed_tokens.weight"] = named["model.embed_tokens.weight"]
    named[f"{layer}.shared_head.head.weight"] = named["lm_head.weight"]
    return named


def stored(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by name, rounded to bf16 except `e_score_correction_bias` (float32)."""
    return {
        name: weight.detach().to(torch.float32 if name.endswith("correction_bias") else torch.bfloat16).clone()
        for name, weight in sorted(tensors.items())
    }


def _without_general(values: dict[str, Any]) -> dict[str, Any]:
    inside = {key: _without_general(value) if isinstance(value, dict) else value for key, value in values.items()}
    return {key: value for key, value in inside.items() if key not in GENERAL_KEYS}


def write_configs(folder: Path, config: Any) -> None:
    """Write `config.json` (without transformers' general defaults) and `generation_config.json`.

    Temperature 0 is for vLLM, which takes its defaults from that file and does not know `do_sample`.
    """
    flash = config.model_type == "glm5_next"
    values = _without_general(config.to_dict())
    if not flash:
        values.pop("layer_types", None)
    architecture = "Glm5NextForConditionalGeneration" if flash else "GlmMoeDsaForCausalLM"
    values = {**values, "architectures": [architecture], "dtype": "bfloat16"}
    write_file(folder / "config.json", json.dumps(values, indent=2) + "\n")
    config = config.get_text_config()
    generation = {
        "do_sample": False,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
        "temperature": 0.0,
    }
    write_file(folder / "generation_config.json", json.dumps(generation, indent=2) + "\n")


def export_checkpoint(folder: Path, model: Any, mtp: MtpLayer | None, tokenizer: Any) -> None:
    """Write weights, configs, tokenizer and chat template to `folder`; without `mtp` the model is a Flash."""
    folder.mkdir(parents=True, exist_ok=True)
    if mtp is None:
        model.save_pretrained(folder)
        tensors = load_tensors(folder)
        write_file(folder / "processor_config.json", json.dumps(PROCESSOR, indent=2) + "\n")
    else:
        tensors = hub_tensors(model, mtp, folder)
    write_configs(folder, model.config)
    tokenizer.save_pretrained(folder)
    save_tensors(folder, stored(tensors))
