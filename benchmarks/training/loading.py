"""Loads a demonstration checkpoint for measuring: transformers' model, our MTP layer, the tokenizer."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm5_ascend.demo_model.outliers import WEIGHTS_NAME

from .trunk import MtpLayer, align_norm_eps, text_model


def load_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of `model.safetensors`, as stored."""
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = load_file(folder / WEIGHTS_NAME)
    return tensors


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer with its chat template."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def load_model(folder: Path, attention: str = "eager") -> Any:
    """transformers' model in float32 from the stored weights, norms at the configured epsilon."""
    from transformers import AutoConfig, Glm5NextForConditionalGeneration, GlmMoeDsaForCausalLM

    kind = AutoConfig.from_pretrained(folder, trust_remote_code=False).model_type
    loader: Any = Glm5NextForConditionalGeneration if kind == "glm5_next" else GlmMoeDsaForCausalLM
    talk = logging.getLogger("transformers.modeling_utils")
    level = talk.level
    talk.setLevel(logging.ERROR)  # it reports the MTP layer's tensors, which it never loads, as unexpected
    try:
        model = loader.from_pretrained(
            folder, trust_remote_code=False, dtype=torch.float32, attn_implementation=attention
        )
    finally:
        talk.setLevel(level)
    align_norm_eps(text_model(model), model.config.get_text_config().rms_norm_eps)
    return model.eval()


def load_mtp(folder: Path, model: Any) -> MtpLayer:
    """The MTP layer in float32; its embedding and head are the model's."""
    mtp = MtpLayer(model.config).float()
    prefix = f"model.layers.{model.config.num_hidden_layers}."
    tensors = {name.removeprefix(prefix): t for name, t in load_tensors(folder).items() if name.startswith(prefix)}
    state: dict[str, Tensor] = {}
    for name in mtp.state_dict():
        if not name.startswith("block."):
            state[name] = tensors["shared_head.norm.weight" if name == "norm.weight" else name]
            continue
        hub = name.removeprefix("block.")
        stem, _, last = hub.rpartition(".")
        if last == "gate_up_proj":
            gates, ups = ([tensors[f"{stem}.{e}.{m}_proj.weight"] for e in _experts(model)] for m in ("gate", "up"))
            state[name] = torch.stack([torch.cat(pair) for pair in zip(gates, ups, strict=True)])
        elif last == "down_proj":
            state[name] = torch.stack([tensors[f"{stem}.{e}.down_proj.weight"] for e in _experts(model)])
        else:
            state[name] = tensors[hub]
    mtp.load_state_dict(state)
    align_norm_eps(mtp, model.config.rms_norm_eps)
    return mtp.eval()


def _experts(model: Any) -> range:
    return range(model.config.n_routed_experts)
