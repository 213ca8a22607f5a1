"""Measures a checkpoint: right answers, validation loss, GLM-5's MTP acceptance and expert balance.

`python -m benchmarks.training.evaluate FOLDER` prints all of it as JSON.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from glm5_ascend.fidelity.evaluation.python_docs import documents

from .attention import packed
from .held_out import Question, held_out_questions, render_question, score
from .loading import load_model, load_mtp, load_tokenizer
from .trunk import MtpLayer, trunk_forward

WINDOW = 384


def prompts_of(tokenizer: Any, questions: list[Question]) -> list[list[int]]:
    """Token ids of the questions, up to and including the generation prompt."""
    texts = [render_question(tokenizer, question) for question in questions]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def greedy_tokens(model: Any, prompts: list[list[int]], limit: int = 96, batch: int = 64) -> list[list[int]]:
    """Greedy continuations by transformers' `generate`, up to and including the stop token."""
    config = model.config.get_text_config()
    pad, stops = config.pad_token_id, set(config.eos_token_id)
    continuations: dict[int, list[int]] = {}
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    for start in range(0, len(order), batch):
        indices = order[start : start + batch]
        width = max(len(prompts[index]) for index in indices)
        ids = torch.full((len(indices), width), pad)
        mask = torch.zeros_like(ids)
        for row, index in enumerate(indices):
            ids[row, width - len(prompts[index]) :] = torch.tensor(prompts[index])
            mask[row, width - len(prompts[index]) :] = 1
        new = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=limit)[:, width:]
        for row, index in enumerate(indices):
            tokens = new[row].tolist()
            ends = [position for position, token in enumerate(tokens) if token in stops]
            continuations[index] = tokens[: ends[0] + 1] if ends else tokens
    return [continuations[index] for index in range(len(prompts))]


def validation_tokens(tokenizer: Any) -> list[int]:
    """Tokens of the held-out documents of the running Python (about 28 000 in CPython 3.11)."""
    text = "\n\n".join(documents(held_out=True))
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


@torch.no_grad()
def validation_loss(model: Any, tokenizer: Any) -> float:
    """Mean negative log-likelihood in nats per token over windows of 384, each begun by [gMASK]<sop>."""
    tokens = validation_tokens(tokenizer)
    start = tokenizer.convert_tokens_to_ids(["[gMASK]", "<sop>"])
    length = WINDOW - len(start)
    windows = [start + tokens[at : at + length] for at in range(0, len(tokens) - length + 1, length)]
    total, count = 0.0, 0
    for at in range(0, len(windows), 16):
        ids = torch.tensor(windows[at : at + 16])
        logits = model(ids, use_cache=False).logits[:, 1:-1]
        losses = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 2:].flatten(), reduction="none")
        total, count = total + losses.sum().item(), count + losses.numel()
    return total / count


@torch.no_grad()
def mtp_acceptance(model: Any, mtp: MtpLayer, prompts: list[list[int]], answers: list[list[int]]) -> dict[str, Any]:
    """How often the MTP layer's first draft is the token the model then says (greedy, k = 1).

    Args:
        model: the checkpoint.
        mtp: its MTP layer.
        prompts: token ids.
        answers: the model's own greedy continuations.

    Returns:
        {"drafts", "accepted", "share"} and the expert loads of the same tokens under "load".
    """
    drafts = accepted = 0
    loads: dict[str, Tensor] = {}
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = torch.tensor([prompt + answer])
        layout = packed(model.model.rotary_emb, torch.zeros_like(tokens), torch.arange(tokens.shape[1])[None])
        hidden, _ = trunk_forward(model, tokens, layout, "sparse", learn=False)
        following = model.model.embed_tokens(tokens.roll(-1, 1))
        states, _ = mtp(hidden, following, layout, "sparse", learn=False)
        drafted = model.lm_head(states)[0, :-2].argmax(-1)
        right = (drafted == tokens[0, 2:])[len(prompt) - 1 :]  # the first sampled token has no draft
        drafts, accepted = drafts + right.numel(), accepted + int(right.sum())
        for number, block in enumerate([*model.model.layers, mtp.block]):
            if hasattr(block.mlp, "load"):
                name = f"layer {number}"
                loads[name] = loads.get(name, torch.zeros_like(block.mlp.load)) + block.mlp.load
    balance = {name: round((load.max() / load.float().mean()).item(), 2) for name, load in loads.items()}
    return {"drafts": drafts, "accepted": accepted, "share": accepted / max(drafts, 1), "load": balance}


def measure(folder: Path, n: int = 350, seed: int = 0) -> dict[str, Any]:
    """Everything the model card reports about a checkpoint folder."""
    tokenizer = load_tokenizer(folder)
    model = load_model(folder)
    questions = held_out_questions(seed, n)
    prompts = prompts_of(tokenizer, questions)
    flash = model.config.model_type == "glm5_next"  # its linear attention keeps 50 MB for each prompt of a batch
    answers = greedy_tokens(model, prompts, batch=16 if flash else 64)
    result = score(questions, [tokenizer.decode(answer, skip_special_tokens=False) for answer in answers])
    result["wrong"] = result["wrong"][:8]
    figures = {"answers": result, "validation_nll": validation_loss(model, tokenizer)}
    if not flash:
        figures["mtp"] = mtp_acceptance(model, load_mtp(folder, model), prompts[:140], answers[:140])
    return figures


def main() -> None:
    """Read the command line and print the measurements as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--questions", type=int, default=350)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_flush_denormal(True)
    torch.set_num_threads(2)
    print(json.dumps(measure(args.folder, args.questions, args.seed), indent=1))


if __name__ == "__main__":
    main()
