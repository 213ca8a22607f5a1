"""Whole forward passes of SGLang's own model and of its draft, over sequences: logits of every position.

`scale_bias` are factors: the INT4 experts' sums are left as loaded (1), dropped (0) or doubled (2) in all layers.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sglang_on_cpu import load, start  # isort: skip  # before SGLang

import torch
from safetensors.torch import save_file
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang_on_cpu.attention import Backend, one_sequence


class DraftInput(SimpleNamespace):
    """Input of a draft from the target model."""

    def __getattr__(self, _: str) -> None:
        return None


@torch.no_grad()
def hidden_states(model: Any, tokens: list[int], previous: torch.Tensor | None = None) -> torch.Tensor:
    """[tokens, hidden], behind the last norm; a draft needs `previous` of the target."""
    batch = one_sequence(tokens)
    if previous is not None:
        batch.spec_info = DraftInput(hidden_states=previous)
    with forward_context(ForwardContext(attn_backend=Backend(len(tokens))), forward_batch=batch):
        outputs = model.model(batch.input_ids, batch.positions, batch)
    return outputs[0] if isinstance(outputs, tuple) else outputs


def scaled(model: torch.nn.Module, factor: float, tensors: dict[str, torch.Tensor]) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("scale_bias"):
            parameter.data = tensors.setdefault(name, parameter.data.clone()) * factor


def run(checkpoint: str, out: Path, sequences: list[list[int]], scale_bias: list[float], draft: bool = False) -> None:
    args = start.engine(checkpoint, **(start.MTP if draft else {}))
    target = load.loaded(start.model_config(args))
    head, tensors, outputs = target.lm_head.weight.float(), {}, {}
    for factor in scale_bias:
        scaled(target, factor, tensors)
        for number, tokens in enumerate(sequences):
            hidden = hidden_states(target, tokens)
            outputs[f"target.{factor}.{number}"] = hidden.float() @ head.T
    if draft:
        follower = load.loaded(start.model_config(args, draft=True))
        follower.model.embed_tokens.weight = target.model.embed_tokens.weight  # as set_embed_and_head does
        scaled(target, 1, tensors)
        for number, tokens in enumerate(sequences):
            hidden = hidden_states(target, tokens)
            following = [*tokens[1:], int((hidden[-1].float() @ head.T).argmax())]
            outputs[f"draft.{number}"] = hidden_states(follower, following, hidden).float() @ head.T
    save_file({name: tensor.contiguous() for name, tensor in outputs.items()}, out / "logits.safetensors")
