"""Measures a checkpoint: right answers and GLM-5's MTP acceptance; `glm5-ascend eval` prints its loss.

`python -m benchmarks.training.evaluate FOLDER` prints both as JSON.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from glm5_ascend.fidelity.evaluation.python_docs import documents

from .attention import packed
from .held_out import Question, held_out_questions, render_question, score
from .loading import load_model, load_mtp, load_tokenizer
from .trunk import MtpLayer, trunk_forward


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
        rows = [torch.tensor(prompts[index]) for index in indices]
        ids = pad_sequence(rows, batch_first=True, padding_value=pad, padding_side="left")
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
        new = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=limit)[:, ids.shape[1] :]
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
def mtp_acceptance(model: Any, mtp: MtpLayer, prompts: list[list[int]], answers: list[list[int]]) -> dict[str, Any]:
    """How often the MTP layer's first draft is the token the model then says (greedy, k = 1).

    Args:
        answers: the model's own greedy continuations of the prompts.
    """
    drafts = accepted = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = torch.tensor([prompt + answer])
        layout = packed(model.model.rotary_emb, torch.zeros_like(tokens), torch.arange(tokens.shape[1])[None])
        hidden, _ = trunk_forward(model, tokens, layout, "sparse", learn=False)
        following = model.model.embed_tokens(tokens.roll(-1, 1))
        states, _ = mtp(hidden, following, layout, "sparse", learn=False)
        drafted = model.lm_head(states)[0, :-2].argmax(-1)
        right = (drafted == tokens[0, 2:])[len(prompt) - 1 :]  # the first sampled token has no draft
        drafts, accepted = drafts + right.numel(), accepted + int(right.sum())
    return {"drafts": drafts, "accepted": accepted, "share": accepted / max(drafts, 1)}


def measure(folder: Path, n: int = 350, seed: int = 0) -> dict[str, Any]:
    """The answers and the MTP acceptance that the model card reports."""
    tokenizer = load_tokenizer(folder)
    model = load_model(folder)
    questions = held_out_questions(seed, n)
    prompts = prompts_of(tokenizer, questions)
    flash = model.config.model_type == "glm5_next"  # its linear attention keeps 50 MB for each prompt of a batch
    answers = greedy_tokens(model, prompts, batch=16 if flash else 64)
    result = score(questions, [tokenizer.decode(answer, skip_special_tokens=False) for answer in answers])
    result["wrong"] = result["wrong"][:8]
    figures = {"answers": result}
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
