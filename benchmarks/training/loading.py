"""Loads a demonstration checkpoint for measuring: transformers' model, our MTP layer, the tokenizer."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from .outliers import WEIGHTS_NAME
from .trunk import MtpLayer, align_norm_eps, mtp_config


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer with its chat template."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def load_model(folder: Path, attention: str = "eager", config: Any = None) -> Any:
    """transformers' model in float32 from the stored weights, norms at the epsilon of `config` or the folder's own."""
    from transformers import AutoConfig, Glm5NextForConditionalGeneration, GlmMoeDsaForCausalLM

    config = config or AutoConfig.from_pretrained(folder, trust_remote_code=False)
    loader: Any = Glm5NextForConditionalGeneration if config.model_type == "glm5_next" else GlmMoeDsaForCausalLM
    talk = logging.getLogger("transformers.modeling_utils")
    level = talk.level
    talk.setLevel(logging.ERROR)  # it reports the MTP layer's tensors, which it never loads, as unexpected
    try:
        model = loader.from_pretrained(
            folder, config=config, trust_remote_code=False, dtype=torch.float32, attn_implementation=attention
        )
    finally:
        talk.setLevel(level)
    align_norm_eps(getattr(model.model, "language_model", model.model), model.config.get_text_config().rms_norm_eps)
    return model.eval()


def load_mtp(folder: Path, model: Any) -> MtpLayer:
    """The MTP layer in float32; its embedding and head are the model's."""
    mtp = MtpLayer(model.config).float()
    mtp.block = load_model(folder, config=mtp_config(model.config)).model.layers[-1]
    prefix, tensors = f"model.layers.{model.config.num_hidden_layers}.", load_file(folder / WEIGHTS_NAME)
    own = {"norm.weight": tensors[f"{prefix}shared_head.norm.weight"]}
    own |= {f"{name}.weight": tensors[f"{prefix}{name}.weight"] for name in ("enorm", "hnorm", "eh_proj")}
    mtp.load_state_dict(own, strict=False)
    align_norm_eps(mtp, model.config.rms_norm_eps)
    return mtp.eval()
