"""Sparse attention on real text: NLL of SmolLM2 in GLM-5's form for several `index_topk`, bf16 and quantized.

    python benchmarks/report_sparse.py [--work DIR] [--contexts 1024 2048] [--topk 64 128 256 512]

The converted model has dense attention, and an indexer that nobody trained. Here each layer's indexer learns to imitate
dense attention by the loss of DeepSeek-V3.2's warm-up (training/indexer_loss.py), on the residual streams of the float
model: 32 texts of Python's documentation and library, some queries of one text in a step. Memory: the streams and keys
of these texts in fp32.

Evaluated are documentation, licences and code that neither calibration nor training has seen (tools/real_texts.py).
NLL is the mean behind the smallest `index_topk`. Rows: all keys; the indexer as converted and trained; recipes on the
trained one, and `indexer in INT8 alone`. `w8a8c8` is `w8a8` with INT8 caches of the indexer (LI-C8), `INT8 latents` the
trained float model with such a cache of attention (SFA-C8). Checkpoints in --work are reused. Exit 1 if 512 trained
keys lose more than 0.02 against dense attention, or training gains nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file
from tools.fidelity_checkpoints import make_demo, quantized
from tools.real_texts import modules, versions, write_texts
from torch import Tensor
from torch.nn.functional import cross_entropy
from training.attention import Attention, Operands, Packed, index_parts, indexer_loss, operands, packed
from training.loading import load_model
from training.trunk import block_forward, trunk_forward

from glm5_ascend.checkpoint.tokenizer import SourceTokenizer
from glm5_ascend.fidelity.evaluation.compare import reference_at
from glm5_ascend.fidelity.evaluation.python_docs import documents
from glm5_ascend.fidelity.evaluation.windows import read_tasks
from glm5_ascend.quantize.recipe import find_recipe, recipe_content

#: Values that share a scale of an INT8 cache of latents. GLM-5's have 128 of 512; 576 is no multiple of that.
GROUP = 144
RECIPES = ("w8a8", "w8a8c8", "w4a8")
#: Texts to learn from, tokens of each, steps of a layer, queries of a step.
TEXTS, LENGTH, STEPS, QUERIES = 32, 1024, 192, 128
LEARNING_RATE = 1e-3


def training_tokens(source: Path) -> Tensor:
    """int64 [TEXTS, LENGTH] of documentation and code that is not evaluated, in turns."""
    tokenizer, rows = SourceTokenizer(source), []
    for texts in (documents(held_out=False), modules(held_out=False)):
        tokens = tokenizer.encode("\n\n".join(texts))
        whole = torch.tensor(tokens[: len(tokens) // LENGTH * LENGTH]).view(-1, LENGTH)
        rows.append(whole[torch.linspace(0, len(whole) - 1, TEXTS // 2).long()])
    return torch.stack(rows, 1).flatten(0, 1)


def one_text(model: Any, length: int) -> Packed:
    """The layout of a row that holds one text."""
    return packed(model.model.rotary_emb, torch.zeros(1, length, dtype=torch.long), torch.arange(length)[None])


def train_indexers(source: Path, out: Path) -> Path:
    """Write `source` with trained indexers; prints the divergence of every layer before and after."""
    if out.is_dir():
        return out
    model: Any = load_model(source, "sdpa")
    tokens = training_tokens(source)
    layout = one_text(model, LENGTH)
    with torch.no_grad():
        hidden = model.model.embed_tokens(tokens)
    for index, layer in enumerate(model.model.layers):
        first, last = train_indexer(layer, hidden, layout)
        print(f"layer {index}: divergence {first:.3f} before, {last:.3f} after", flush=True)
        with torch.no_grad():
            for row in hidden.split(1):
                row.copy_(block_forward(layer, row, layout, "dense", False)[0])
    tensors = load_file(source / "model.safetensors")
    for name, value in model.state_dict().items():
        if ".indexer." in name:
            tensors[name] = value.to(tensors[name].dtype).contiguous()
    out.mkdir()
    for file in source.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def train_indexer(layer: Any, hidden: Tensor, layout: Packed) -> tuple[float, float]:
    """Train a layer's indexer on its inputs [TEXTS, LENGTH, hidden]; mean divergence of the first and last texts."""
    with torch.no_grad():
        inputs = [layer.input_layernorm(row) for row in hidden.split(1)]
        targets = [operands(layer.self_attn, x, layout) for x in inputs]
        layer.self_attn.indexer.weights_proj.weight.copy_(ones(torch.cat(inputs, 1)[0]))
    losses = indexer_losses(layer.self_attn, inputs, targets, layout)
    return sum(losses[:TEXTS]) / TEXTS, sum(losses[-TEXTS:]) / TEXTS


def ones(x: Tensor) -> Tensor:
    """u [hidden] with u . x near 1 for all rows of x [T, hidden]: a head whose weight is negative learns nothing."""
    ridge = 1e-3 * len(x) * torch.eye(x.shape[1])
    return torch.linalg.solve(x.T @ x + ridge, x.sum(0))


def indexer_losses(attention: Any, inputs: list[Tensor], targets: list[Operands], layout: Packed) -> list[float]:
    """Train the indexer of `attention`: the loss of every step, on some queries of a text in turns."""
    indexer = attention.indexer.requires_grad_(True)
    optimizer = torch.optim.Adam(indexer.parameters(), LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, STEPS)
    chance, losses = torch.Generator().manual_seed(0), []
    for step in range(STEPS):
        target = targets[step % TEXTS]
        queries = torch.randperm(LENGTH, generator=chance)[:QUERIES].sort().values
        parts = index_parts(indexer, inputs[step % TEXTS], target.q_resid, layout, queries)
        imitated = Attention(target.q[:, queries], target.k, attention.scaling)
        divergence = indexer_loss(imitated, parts, layout.allowed[:, queries])
        optimizer.zero_grad()
        divergence.backward()
        torch.nn.utils.clip_grad_norm_(indexer.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(divergence.item())
    indexer.requires_grad_(False)
    return losses


def int8_latents(checkpoint: Path) -> Any:
    """The float model with the latents of its attention as an INT8 cache holds them, a scale for 144 of 576 values."""
    model: Any = load_model(checkpoint, "sdpa")

    def rounded(norm: Any, inputs: Any, latents: Tensor) -> Tensor:
        groups = latents.unflatten(-1, (-1, GROUP))
        scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-9) / 127
        return ((groups / scale).round() * scale).flatten(-2)

    for layer in model.model.layers:
        layer.self_attn.kv_a_layernorm.register_forward_hook(rounded)
    return model


@torch.no_grad()
def float_nll(model: Any, windows: list[Tensor], topk: int) -> Tensor:
    """NLL [windows, context - 1] of a float model with sparse attention."""
    layout, losses = one_text(model, len(windows[0])), []
    for layer in model.model.layers:
        layer.self_attn.indexer.index_topk = topk
    for window in windows:
        hidden, _ = trunk_forward(model, window[None], layout, "sparse", False)
        losses.append(cross_entropy(model.lm_head(hidden[0, :-1]), window[1:], reduction="none"))
    return torch.stack(losses)


def nll(checkpoint: Path, windows: list[Tensor], first: int) -> float:
    """Mean NLL of a checkpoint on windows of one length, at the positions behind the first `first`."""
    true = torch.cat([window[1:] for window in windows])[:, None]
    return float(-reference_at(checkpoint, windows, true)[0].view(len(windows), -1)[:, first:].mean())


def indexer_alone(work: Path) -> Path:
    """The recipe w8a8 with all but the indexer in FLOAT."""
    recipe, path = recipe_content(find_recipe("w8a8")), work / "indexer.yaml"
    steps = [step for step in recipe["spec"]["process"] if step["type"] == "group"]
    steps[0]["configs"] = [steps[0]["configs"][0] | {"include": ["*indexer*"]}]
    recipe["spec"]["process"] = steps
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    return path


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
            target.symlink_to(file.resolve())
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("work/sparse"))
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--topk", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--windows", type=int, default=6, help="of each context; fewer where a text ends")
    parser.add_argument("--recipes", nargs="*", default=RECIPES)
    options = parser.parse_args()
    work, first = options.work, min(options.topk)
    work.mkdir(parents=True, exist_ok=True)
    converted = make_demo(work / "smollm2", model="smollm2")
    trained = train_indexers(converted, work / "trained")
    models = {"bf16, trained": trained, "indexer as converted": converted}
    models["indexer in INT8 alone"] = quantized(trained, work / "indexer", str(indexer_alone(work)), [])
    int8_cache = int8_latents(trained)
    models |= {recipe: quantized(trained, work / recipe, recipe, []) for recipe in options.recipes}
    texts, losses = write_texts(work / "texts.jsonl"), []
    print(f"Texts of {versions()}")
    print(f"{'context':>7} {'index_topk':>10} {'':22} {'NLL':>7}")
    for context in options.contexts:
        windows = read_tasks(texts, converted, context, options.windows).windows
        dense = nll(converted, windows, first)
        print(f"{context:7} {'all':>10} {f'bf16, {len(windows)} windows':22} {dense:7.4f}", flush=True)
        for topk in options.topk:
            rows = {name: nll(with_topk(model, topk), windows, first) for name, model in models.items()}
            rows["bf16, INT8 latents"] = float(float_nll(int8_cache, windows, topk)[:, first:].mean())
            for name, value in rows.items():
                print(f"{context:7} {topk:10} {name:22} {value:7.4f}", flush=True)
            losses.append((topk, rows["bf16, trained"] - dense, rows["indexer as converted"] - dense))
    worst = max(loss for topk, loss, _ in losses if topk == max(options.topk))
    gained = all(loss < before for _, loss, before in losses)
    ok = worst <= 0.02 and gained
    verdict = f"{max(options.topk)} trained keys: {worst:+.4f} NLL; training gains everywhere: {gained}"
    print(f"{'ok  ' if ok else 'FAIL'} {verdict}")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
