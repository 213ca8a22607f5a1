"""Sparse attention on real text: perplexity of SmolLM2 in GLM-5's form for several `index_topk`, bf16 and quantized.

    python benchmarks/report_sparse.py [--work DIR] [--contexts 1024 2048] [--topk 64 128 256 512]

The converted model's indexer has never been trained. Here it learns to imitate dense attention, layer by layer, by the
loss of DeepSeek-V3.2's warm-up (training/indexer_loss.py): only one layer's indexer is trained at a time, on the
residual streams of the float model. Texts of Python's documentation; the evaluated ones are held out.

Rows: each context and `index_topk`, with the indexer as converted and trained; then the recipes on the trained one.
NLL is over the positions with more than the smallest `index_topk` tokens before them, the same for every row.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tools.fidelity_checkpoints import make_demo, quantized
from torch import Tensor
from training.attention import Packed, attend, packed
from training.loading import load_model
from training.trunk import block_forward

from glm5_ascend.checkpoint.tokenizer import SourceTokenizer
from glm5_ascend.fidelity.evaluation.compare import FidelityComparison, compare
from glm5_ascend.fidelity.evaluation.python_docs import documents
from glm5_ascend.fidelity.evaluation.windows import read_windows

RECIPES = ("w8a8", "w8a8c8", "w4a8", "w4a8-best")
#: Texts that the indexers learn from, their tokens, and how often each is read.
TRAINING_TEXTS, TRAINING_LENGTH, PASSES = 12, 1024, 1
LEARNING_RATE = 1e-3


def train_indexers(source: Path, out: Path) -> Path:
    """Write `source` with trained indexers, one layer after the other; prints each layer's loss before and after."""
    if out.is_dir():
        return out
    model: Any = load_model(source, "sdpa")
    tokens = training_tokens(source)
    layout = packed(model.model.rotary_emb, torch.zeros_like(tokens[:1]), torch.arange(tokens.shape[1])[None])
    with torch.no_grad():
        hidden = model.model.embed_tokens(tokens)
    for index, layer in enumerate(model.model.layers):
        first, last = train_indexer(layer, hidden, layout)
        print(f"layer {index}: divergence {first:.4f} before, {last:.4f} after", flush=True)
        with torch.no_grad():
            for row in range(len(hidden)):
                hidden[row : row + 1] = block_forward(layer, hidden[row : row + 1], layout, "dense", False)[0]
    trained = {name: value for name, value in model.state_dict().items() if ".indexer." in name}
    out.mkdir()
    for file in source.iterdir():
        if file.name != "model.safetensors":
            (out / file.name).write_bytes(file.read_bytes())
    tensors = load_file(source / "model.safetensors")
    tensors |= {name: value.to(tensors[name].dtype).contiguous() for name, value in trained.items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def training_tokens(source: Path) -> Tensor:
    """int64 [TRAINING_TEXTS, TRAINING_LENGTH] of the documentation that `eval` does not hold out."""
    tokens = SourceTokenizer(source).encode("\n\n".join(documents(held_out=False)))
    rows = torch.tensor(tokens[: len(tokens) // TRAINING_LENGTH * TRAINING_LENGTH]).view(-1, TRAINING_LENGTH)
    return rows[torch.linspace(0, len(rows) - 1, TRAINING_TEXTS).long()]


def train_indexer(layer: Any, hidden: Tensor, layout: Packed) -> tuple[float, float]:
    """Train a layer's indexer on the layer's inputs [texts, T, hidden]; divergence at first and at last."""
    parameters = list(layer.self_attn.indexer.parameters())
    for parameter in parameters:
        parameter.requires_grad_(True)
    optimizer = torch.optim.Adam(parameters, LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, PASSES * len(hidden))
    losses: list[float] = []
    for row in hidden.split(1) * PASSES:
        with torch.no_grad():
            x = layer.input_layernorm(row)
        divergence = attend(layer.self_attn, x, layout, "warmup", True)[1]
        assert divergence is not None
        optimizer.zero_grad()
        divergence.backward()
        optimizer.step()
        schedule.step()
        losses.append(divergence.item())
    for parameter in parameters:
        parameter.requires_grad_(False)
    return losses[0], sum(losses[-4:]) / 4


def with_topk(checkpoint: Path, topk: int) -> Path:
    """A folder of links to `checkpoint` whose config.json has another `index_topk`."""
    out = checkpoint.with_name(f"{checkpoint.name}-top{topk}")
    out.mkdir(exist_ok=True)
    for file in checkpoint.iterdir():
        target = out / file.name
        target.unlink(missing_ok=True)
        if file.name == "config.json":
            target.write_text(json.dumps(json.loads(file.read_text()) | {"index_topk": topk}))
        else:
            os.link(file, target)
    return out


def mean_nll(values: Tensor, first: int) -> float:
    """Mean of [windows, positions] behind position `first`."""
    return float(values[:, first:].mean())


def rows(
    models: dict[str, Path], reference: Path, windows: list[Tensor], topks: list[int]
) -> Iterator[tuple[str, int, FidelityComparison]]:
    """Each model against `reference` with the same `index_topk`."""
    for topk in topks:
        source = with_topk(reference, topk)
        for name, model in models.items():
            yield name, topk, compare(with_topk(model, topk), source, windows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("work/sparse"))
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--topk", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--windows", type=int, default=6, help="of each context")
    parser.add_argument("--recipes", nargs="*", default=RECIPES)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    converted = make_demo(options.work / "smollm2", model="smollm2")
    trained = train_indexers(converted, options.work / "trained")
    models = {"indexer as converted": converted} | {
        recipe: quantized(trained, options.work / recipe, recipe, []) for recipe in options.recipes
    }
    first, worst = min(options.topk), 0.0
    print(f"{'context':>7} {'index_topk':>10} {'':22} {'NLL':>8} {'KL to bf16 with the same index_topk':>36}")
    for context in options.contexts:
        windows = read_windows(None, converted, context, options.windows)
        dense = compare(models["indexer as converted"], trained, windows)
        base = mean_nll(dense.nll_reference, first)
        print(f"{context:7} {'all':>10} {'bf16':22} {base:8.4f}", flush=True)
        for name, topk, comparison in rows(models, trained, windows, [k for k in options.topk if k < context]):
            if name == next(iter(models)):
                nll = mean_nll(comparison.nll_reference, first)
                worst = max(worst, nll - base) if topk == max(options.topk) else worst
                print(f"{context:7} {topk:10} {'bf16, trained':22} {nll:8.4f}")
            nll, kl = mean_nll(comparison.nll_quantized, first), mean_nll(comparison.kl, first)
            print(f"{context:7} {topk:10} {name:22} {nll:8.4f} {kl:36.4f}", flush=True)
    ok = worst <= 0.02
    print(f"{'ok  ' if ok else 'FAIL'} trained, {max(options.topk)} keys: NLL within 0.02 of dense (is {worst:+.4f})")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
