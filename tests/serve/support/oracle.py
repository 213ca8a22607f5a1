"""transformers as the judge: fp32, greedy, eager attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

NEW_TOKENS = 32


def hf_model(directory: Path) -> Any:
    """transformers' model in fp32 with vLLM's eps in the two low-rank norms (transformers uses its class default)."""
    from transformers import GlmMoeDsaForCausalLM

    model = GlmMoeDsaForCausalLM.from_pretrained(
        directory, trust_remote_code=False, dtype="float32", attn_implementation="eager"
    ).eval()
    for name, module in model.named_modules():
        if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
            module.variance_epsilon = model.config.rms_norm_eps
    return model


def hf_continue(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy continuations of NEW_TOKENS tokens, one prompt at a time."""
    import torch

    length = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
    outputs = [model.generate(torch.tensor([prompt]), do_sample=False, **length)[0] for prompt in prompts]
    return [output[len(prompt) :].tolist() for output, prompt in zip(outputs, prompts, strict=True)]
