"""Writes the trained weights in the hub format: bf16, one tensor per expert, the MTP layer under layer L."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .tokenizer import chat_template
from .trunk import MtpLayer

WEIGHTS = "model.safetensors"


def _split_experts(name: str, weight: Tensor) -> dict[str, Tensor]:
    """[E, 2 * width, hidden] or [E, hidden, width] -> one entry per expert and matrix."""
    stem = name.rsplit(".", 1)[0]
    found: dict[str, Tensor] = {}
    for expert, matrix in enumerate(weight):
        if name.endswith("gate_up_proj"):
            gate, up = matrix.chunk(2)
            found[f"{stem}.{expert}.gate_proj.weight"] = gate
            found[f"{stem}.{expert}.up_proj.weight"] = up
        else:
            found[f"{stem}.{expert}.down_proj.weight"] = matrix
    return found


def hub_tensors(model: Any, mtp: MtpLayer) -> dict[str, Tensor]:
    """Every tensor under its hub name, rounded to bf16 except `e_score_correction_bias` (float32)."""
    layer = f"model.layers.{model.config.num_hidden_layers}"
    named = dict(model.state_dict())
    for name, weight in mtp.state_dict().items():
        if name.startswith("block."):
            named[f"{layer}.{name.removeprefix('block.')}"] = weight
        else:
            named[f"{layer}.{'shared_head.' if name == 'norm.weight' else ''}{name}"] = weight
    named[f"{layer}.embed_tokens.weight"] = named["model.embed_tokens.weight"]
    named[f"{layer}.shared_head.head.weight"] = named["lm_head.weight"]
    flat: dict[str, Tensor] = {}
    for name, weight in named.items():
        pieces = _split_experts(name, weight) if re.search(r"experts\.(gate_up|down)_proj$", name) else None
        flat.update(pieces or {name: weight})
    return {
        name: weight.detach().to(torch.float32 if name.endswith("correction_bias") else torch.bfloat16).clone()
        for name, weight in sorted(flat.items())
    }


def save_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write `model.safetensors` and its index."""
    from safetensors.torch import save_file

    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict.fromkeys(sorted(tensors), WEIGHTS)}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def export_checkpoint(folder: Path, model: Any, mtp: MtpLayer, tokenizer: Any) -> None:
    """Write weights, configs, tokenizer and chat template to `folder`."""
    from transformers import GenerationConfig

    folder.mkdir(parents=True, exist_ok=True)
    config = model.config
    values = config.to_dict()
    values["architectures"] = ["GlmMoeDsaForCausalLM"]
    values["dtype"] = "bfloat16"
    text = json.dumps({key: value for key, value in values.items() if key != "_name_or_path"}, indent=2)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
    generation = GenerationConfig(
        eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id, do_sample=False, max_new_tokens=128
    )
    generation.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(chat_template(), encoding="utf-8")
    save_tensors(folder, hub_tensors(model, mtp))
