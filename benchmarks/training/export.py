"""Writes the trained weights in the hub format: bf16, one tensor per expert, GLM-5's MTP layer under layer L."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from glm5_ascend.files.written import write_file

from .outliers import WEIGHTS_NAME, save_tensors
from .trunk import MtpLayer, mtp_config


def hub_tensors(model: Any, mtp: MtpLayer, folder: Path) -> dict[str, Tensor]:
    """Every tensor under its hub name; transformers writes the model with the MTP layer's block as its last layer."""
    whole = type(model)(mtp_config(model.config))
    whole.load_state_dict(model.state_dict(), strict=False)
    whole.model.layers[-1].load_state_dict(mtp.block.state_dict())
    whole.save_pretrained(folder)
    named: dict[str, Tensor] = load_file(folder / WEIGHTS_NAME)
    layer = f"model.layers.{model.config.num_hidden_layers}"
    for name, weight in mtp.state_dict().items():
        if not name.startswith("block."):
            named[f"{layer}.{'shared_head.' if name == 'norm.weight' else ''}{name}"] = weight
    named[f"{layer}.embed_tokens.weight"] = named["model.embed_tokens.weight"]
    named[f"{layer}.shared_head.head.weight"] = named["lm_head.weight"]
    return named


def export_checkpoint(folder: Path, model: Any, mtp: MtpLayer, tokenizer: Any) -> None:
    """Write weights (bf16, `e_score_correction_bias` fp32), configs, tokenizer and chat template to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors, config = hub_tensors(model, mtp, folder), model.config
    config.architectures, config.dtype = ["GlmMoeDsaForCausalLM"], "bfloat16"
    config.save_pretrained(folder)
    generation = {
        "do_sample": False,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
        "temperature": 0.0,  # for vLLM, which takes its defaults from this file and does not know do_sample
    }
    write_file(folder / "generation_config.json", json.dumps(generation, indent=2) + "\n")
    tokenizer.save_pretrained(folder)
    save_tensors(folder, {
        name: weight.detach().to(torch.float32 if name.endswith("correction_bias") else torch.bfloat16).clone()
        for name, weight in sorted(tensors.items())
    })  # fmt: skip
