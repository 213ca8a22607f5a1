"""Train the demonstration model on a CPU: `python -m glm5_ascend.demo_model.train OUT`.

Three stages, as DSA models are trained: A with dense attention, B in which only the indexers (and the MTP layer)
learn, C with the indexers' choice in force. The result is a bf16 checkpoint in the hub format under OUT.
The stages are budgets of wall-clock time: a faster machine sees more tokens.
"""

from __future__ import annotations

import argparse
import random
import re
import time
from pathlib import Path
from typing import Any

import torch

from . import chats, corpus, optim, stages
from .config import demo_config
from .export import export_checkpoint
from .loading import load_model, load_mtp, load_tokenizer
from .rows import DRILL_BATCHES, RowSource
from .tokenizer import train_tokenizer
from .trunk import MtpLayer, align_norm_eps, initialise

TOKENIZER_CHATS = 3000
SPLIT = (0.57, 0.07, 0.36)


def build_tokenizer() -> Any:
    """The tokenizer, learned from the training texts and 3000 training chats."""
    texts = corpus.training_texts()
    writer = train_tokenizer(texts[:20])  # only renders the chats
    rng = random.Random(0)
    rendered = []
    for _ in range(TOKENIZER_CHATS):
        messages, tools, _ = chats.training_chat(rng)
        text = writer.apply_chat_template(messages, tools=tools, tokenize=False)
        rendered.append(re.sub(r"<\|?/?[a-z_]+\|?>|\[gMASK\]", "", text))
    return train_tokenizer(texts + rendered)


def build_model(tokenizer: Any, seed: int, **changes: Any) -> tuple[Any, MtpLayer]:
    """A freshly initialised model in float32 and its MTP layer."""
    from transformers import GlmMoeDsaForCausalLM

    torch.manual_seed(seed)
    config = demo_config(tokenizer, **changes)
    config._attn_implementation = "eager"
    model = GlmMoeDsaForCausalLM(config).float()
    mtp = MtpLayer(config).float()
    initialise(model, mtp, seed)
    for module in (model, mtp):
        align_norm_eps(module, config.rms_norm_eps)
    return model, mtp


def train(args: argparse.Namespace) -> stages.Run:
    """Train and export; returns the run with its history."""
    torch.set_flush_denormal(True)  # inherited by the threads that start later
    torch.set_num_threads(args.threads)
    tokenizer = load_tokenizer(args.resume) if args.resume else build_tokenizer()
    model, mtp = build_model(tokenizer, args.seed)
    if args.resume:
        stored = load_model(args.resume)
        mtp.load_state_dict(load_mtp(args.resume, stored).state_dict())
        model.load_state_dict(stored.state_dict())
    texts = corpus.training_texts()
    source = RowSource(tokenizer, texts, args.rows, args.length, args.text_share, args.seed)
    if args.resume:
        source.made = DRILL_BATCHES
    args.out.mkdir(parents=True, exist_ok=True)
    run = stages.Run(model, mtp, source, args.log or args.out / "training.jsonl", bf16=not args.fp32)
    named = list(model.named_parameters())
    index = [(name, weight) for name, weight in named if ".indexer." in name]
    trunk = [(name, weight) for name, weight in named if ".indexer." not in name]
    ahead = [("mtp." + name, weight) for name, weight in mtp.named_parameters()]
    budget = args.minutes * 60.0

    def snapshot() -> None:
        export_checkpoint(args.out / "latest", model, mtp, tokenizer)

    run.snapshot = snapshot
    first = optim.build(trunk, args.muon_lr, args.adam_lr)
    rates = (args.first_rate, 0.15 * args.first_rate, 0.35)
    stages.train_stage(run, "dense", stages.dense_step, first, budget * args.split[0], rates)
    snapshot()
    for _, weight in trunk:
        weight.requires_grad_(False)
    second = optim.build(index + ahead, args.muon_lr, args.adam_lr)
    stages.train_stage(run, "warmup", stages.warmup_step, second, budget * args.split[1], (1.0, 0.6, 0.5))
    for _, weight in trunk:
        weight.requires_grad_(True)
    every = first + second
    stages.train_stage(run, "sparse", stages.sparse_step, every, budget * args.split[2], (0.2, 0.004, 0.05))
    export_checkpoint(args.out, model, mtp, tokenizer)
    return run


def main() -> None:
    """Read the command line, train, print one line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="folder for the checkpoint")
    parser.add_argument("--minutes", type=float, default=55.0, help="wall-clock budget of the three stages")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=6, help="rows per step")
    parser.add_argument("--length", type=int, default=384, help="tokens per row")
    parser.add_argument("--text-share", type=float, default=0.2, help="share of rows with plain text")
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=0.003)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--split", type=float, nargs=3, default=SPLIT, help="shares of the stages in the budget")
    parser.add_argument("--first-rate", type=float, default=1.0, help="learning rate of stage A, relative")
    parser.add_argument("--resume", type=Path, default=None, help="start from the weights of this checkpoint")
    parser.add_argument("--fp32", action="store_true", help="no bf16 autocast in the matrix products")
    parser.add_argument("--log", type=Path, default=None, help="JSON lines; default OUT/training.jsonl")
    args = parser.parse_args()
    started = time.monotonic()
    run = train(args)
    print(f"{args.out}: {run.seen} tokens in {(time.monotonic() - started) / 60:.1f} min, {run.history[-1]}")


if __name__ == "__main__":
    main()
