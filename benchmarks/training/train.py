"""Train the demonstration model on a CPU: `python -m benchmarks.training.train OUT`.

Three stages, as DSA models are trained: A with dense attention, B in which only the indexers (and the MTP layer)
learn, C with the indexers' choice in force. The result is a bf16 checkpoint in the hub format under OUT,
with the tokenizer of the shipped one.
The stages are budgets of tokens: the same seed on the same kind of machine sees the same rows in the same order.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from glm5_ascend.demo_model.resources import data_folder
from glm5_ascend.fidelity.evaluation.python_docs import documents

from . import optim, stages
from .export import export_checkpoint
from .loading import load_tokenizer
from .rows import RowSource
from .trunk import MtpLayer, align_norm_eps, count_loads, initialise

TOKENS = 6.6e6
SHARES = (0.72, 0.06, 0.22)  # of the tokens, stages A, B and C
ROWS, LENGTH = 6, 384  # of a step, and tokens of each
RATES = (0.02, 0.003)  # peak learning rates of Muon and AdamW


def build_model(seed: int, **changes: Any) -> tuple[Any, MtpLayer]:
    """A freshly initialised model in float32 and its MTP layer, of the shipped architecture but for `changes`."""
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    torch.manual_seed(seed)
    values = json.loads((data_folder() / "config.json").read_text(encoding="utf-8")) | changes
    layers, dense = values["num_hidden_layers"], values["first_k_dense_replace"]
    values["mlp_layer_types"] = ["dense"] * dense + ["sparse"] * (layers - dense)
    values["indexer_types"] = ["full"] * layers
    config = GlmMoeDsaConfig(**values)
    config._attn_implementation = "eager"
    model = GlmMoeDsaForCausalLM(config).float()
    mtp = MtpLayer(config).float()
    initialise(model, mtp, seed)
    count_loads(model, mtp)
    for module in (model, mtp):
        align_norm_eps(module, config.rms_norm_eps)
    return model, mtp


def train(args: argparse.Namespace) -> stages.Run:
    """Train and export; returns the run with its history."""
    torch.set_flush_denormal(True)  # inherited by the threads that start later
    torch.set_num_threads(2)
    tokenizer = load_tokenizer(data_folder())
    model, mtp = build_model(args.seed)
    source = RowSource(tokenizer, documents(held_out=False), ROWS, LENGTH, args.text_share, args.seed)
    bf16 = optim.quick_dtype() is torch.bfloat16
    run = stages.Run(model, mtp, source, bf16)
    named = list(model.named_parameters())
    index = [(name, weight) for name, weight in named if ".indexer." in name]
    trunk = [(name, weight) for name, weight in named if ".indexer." not in name]
    ahead = [("mtp." + name, weight) for name, weight in mtp.named_parameters()]
    dense, warmup, sparse = (max(1, round(args.tokens * share / (ROWS * LENGTH))) for share in SHARES)

    first = optim.build(trunk, *RATES)
    stages.train_stage(run, "dense", stages.dense_step, first, dense, (1.0, 0.15, 0.35))
    for _, weight in trunk:
        weight.requires_grad_(False)
    second = optim.build(index + ahead, *RATES)
    stages.train_stage(run, "warmup", stages.warmup_step, second, warmup, (1.0, 0.6, 0.5))
    for _, weight in trunk:
        weight.requires_grad_(True)
    stages.train_stage(run, "sparse", stages.sparse_step, first + second, sparse, (0.2, 0.004, 0.05))
    export_checkpoint(args.out, model, mtp, tokenizer)
    return run


def main() -> None:
    """Read the command line, train, print one line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="folder for the checkpoint")
    parser.add_argument("--tokens", type=float, default=TOKENS, help="budget of the three stages (default %(default)g)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--text-share", type=float, default=0.10, help="share of rows with plain text")
    args = parser.parse_args()
    started = time.monotonic()
    run = train(args)
    print(f"{args.out}: {run.seen} tokens in {(time.monotonic() - started) / 60:.1f} min, {run.history[-1]}")


if __name__ == "__main__":
    main()
