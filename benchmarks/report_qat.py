"""Quantization-aware training on the demo model: the KL of W4A8 to bf16 with and without it.

    python benchmarks/report_qat.py [--work DIR] [--steps N] [--json FILE]

The bf16 model teaches its own rounded copy: KL between their next-token distributions on training texts and chats,
never the held-out text of the measurements. Training starts from the integers of GPTQ (the row `gptq`: the recipe with
that method). The trained weights go through the command every model goes through (`quantize --recipe
qat-w4a8`), and that checkpoint is measured.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from tools.fidelity_checkpoints import make_demo, quantized
from training import chats
from training.loading import load_model, load_tokenizer

from glm5_ascend.checkpoint import schemes
from glm5_ascend.checkpoint.source import SourceCheckpoint
from glm5_ascend.fidelity.evaluation.compare import compare
from glm5_ascend.fidelity.evaluation.intervals import mean_interval
from glm5_ascend.fidelity.evaluation.metrics import metrics
from glm5_ascend.fidelity.evaluation.python_docs import documents
from glm5_ascend.fidelity.evaluation.stored_model import StoredModel
from glm5_ascend.fidelity.evaluation.windows import read_windows
from glm5_ascend.quantize.plan import LinearPlan
from glm5_ascend.quantize.recipe import find_recipe, recipe_content
from glm5_ascend.quantize.training.prepare import (
    export_trained,
    hub_tensors,
    prepare_qat,
    rounded_linears,
    rounded_weights,
)

RECIPE = "qat-w4a8"  # rounds and does nothing else: what was trained is what is stored
BASELINES = ("w4a8", "w4a8-best", "rtn-w4a8", RECIPE)  # of the source, untrained
START = "gptq"
#: Start of a weight between the middle of its rounding step (0) and its value in the source (1): at the border of the
#: step it would fall off when the scale changes, in the middle it could not leave.
LOOSE = 0.5
WINDOW, ALL = 512, 10_000
CHATS = 0.25  # share of the sequences
LENGTH = 256  # tokens of a sequence in training


def training_sequences(folder: Path, seed: int) -> Iterator[torch.Tensor]:
    """Windows of training documents, and training chats, without end."""
    tokenizer, rng = load_tokenizer(folder), random.Random(seed)
    start = tokenizer.convert_tokens_to_ids(["[gMASK]", "<sop>"])
    texts = "\n\n".join(documents(held_out=False))
    tokens = tokenizer(texts, add_special_tokens=False)["input_ids"]
    while True:
        if rng.random() < CHATS:
            ids = chats.render(tokenizer, *chats.training_chat(rng))[:LENGTH]
        else:
            first = rng.randrange(len(tokens) - LENGTH)
            ids = start + tokens[first : first + LENGTH - len(start)]
        yield torch.tensor(ids)


def divergence(teacher: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
    """Mean KL(teacher || student) of logits [..., vocab]."""
    target = teacher.log_softmax(-1)
    return (target.exp() * (target - student.log_softmax(-1))).sum(-1).mean()


def start_recipe(work: Path) -> Path:
    """The recipe, rounding by GPTQ."""
    recipe = recipe_content(find_recipe(RECIPE))
    for step in recipe["spec"]["process"][0]["configs"]:
        step["qconfig"]["weight"]["method"] = "gptq"
    path = work / "start.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    return path


def start_from(model: Any, linears: dict[str, LinearPlan], checkpoint: Path) -> None:
    """Move each weight so that it rounds to the checkpoint's integer, as near to its source value as `LOOSE` says."""
    files = StoredModel(checkpoint).files
    for name, weight in hub_tensors(model):
        module = name.removesuffix(".weight")
        if module in linears and linears[module].scheme != schemes.FLOAT:
            stored = {suffix: files.read(f"{module}.{suffix}") for suffix in ("weight", "weight_scale")}
            integers, scale = schemes.integer_weight(linears[module].scheme, stored), stored["weight_scale"]
            offset = (weight / scale - integers).clamp(-0.5, 0.5)
            weight.copy_(scale * (integers + LOOSE * offset))


def mean_scales(model: Any) -> dict[str, float]:
    """Mean weight scale of every parameter that is rounded."""
    scales: dict[str, list[float]] = {}
    for name, weight in rounded_weights(model):
        expert = re.fullmatch(r"(.*\.experts)\.\d+\.(\w+)_proj", name)
        fused = "down_proj" if expert and expert[2] == "down" else "gate_up_proj"
        scales.setdefault(f"{expert[1]}.{fused}" if expert else f"{name}.weight", []).append(float(weight.scale.mean()))
    return {name: sum(values) / len(values) for name, values in scales.items()}


def train(source: Path, start: Path, options: argparse.Namespace) -> Any:
    """The model after training. Norms, router and head are trained, too."""
    model, teacher = load_model(source), load_model(source)
    start_from(model, rounded_linears(SourceCheckpoint(source), RECIPE), start)
    prepare_qat(model, RECIPE, source)
    scales, groups = mean_scales(model), []
    for name, weight in model.named_parameters():
        unit = options.lr * scales[name] if name in scales else options.float_lr * float(weight.detach().abs().mean())
        if weight.requires_grad:
            groups.append({"params": [weight], "peak": unit})
    optimizer = torch.optim.Adam(groups, lr=0.0, betas=(0.9, 0.98))
    sequences, started, mean = training_sequences(source, options.seed), time.monotonic(), 0.0
    for step in range(options.steps):
        done = step / options.steps
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * min(1.0, 20 * done + 0.05) * (1 - done)
        total = 0.0
        for _ in range(options.batch):
            tokens = next(sequences)[None]
            with torch.no_grad():
                target = teacher(tokens, use_cache=False).logits
            loss = divergence(target, model(tokens, use_cache=False).logits) / options.batch
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        mean = total if not step else 0.9 * mean + 0.1 * total
        if (step + 1) % 10 == 0:
            print(f"step {step + 1:4} KL on training text {mean:.5f} ({time.monotonic() - started:.0f} s)", flush=True)
    return model


def same_integers(model: Any, checkpoint: Path) -> bool:
    """True if every weight is stored as training rounded it."""
    files = StoredModel(checkpoint).files
    for module, trained in rounded_weights(model):
        scheme = schemes.W4A8_DYNAMIC if ".experts." in module else schemes.W8A8_DYNAMIC
        integers = schemes.integer_weight(scheme, {"weight": files.read(f"{module}.weight")})
        scale = files.read(f"{module}.weight_scale")
        if not torch.equal(integers, trained.integers) or not torch.equal(scale, trained.scale):
            return False
    return True


def gain(ours: torch.Tensor, theirs: torch.Tensor) -> dict[str, Any]:
    """Share by which the mean of `ours` [windows] is lower than that of `theirs`, with its paired interval."""
    return {"lower_by": 1 - float(ours.mean() / theirs.mean()), "interval": mean_interval(theirs - ours, theirs)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("work/qat"))
    parser.add_argument("--steps", type=int, default=130)
    parser.add_argument("--batch", type=int, default=8, help="sequences per step")
    parser.add_argument("--lr", type=float, default=0.006, help="of Adam, in units of each weight's mean scale")
    parser.add_argument("--float-lr", type=float, default=0.0005, help="the same for unrounded weights, of their mean")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    started = time.monotonic()

    shutil.rmtree(options.work, ignore_errors=True)
    options.work.mkdir(parents=True)
    source, trained = make_demo(options.work / "bf16"), options.work / "qat-bf16"
    start = quantized(source, options.work / START, str(start_recipe(options.work)), [])
    model = train(source, start, options)
    export_trained(model, trained, source)
    checkpoints = {name: quantized(source, options.work / name, name, []) for name in BASELINES} | {START: start}
    checkpoints["QAT"] = quantized(trained, options.work / "QAT", RECIPE, [])
    print(f"trained, stored and verified after {(time.monotonic() - started) / 60:.1f} min")

    windows = read_windows(None, source, WINDOW, ALL)
    same = same_integers(model, checkpoints["QAT"])
    print(f"\nintegers and scales of the trained model and of its checkpoint: {'the same' if same else 'DIFFERENT'}")

    results = {name: compare(path, source, windows) for name, path in checkpoints.items()}
    rows = {name: {metric.name: metric.value for metric in metrics(result)} for name, result in results.items()}
    print(f"\n{'checkpoint':10} {'KL to bf16':>11} {'top-1':>7} {'NLL':>8}   ({results['QAT'].kl.numel()} positions)")
    print(f"{'bf16':10} {'':11} {'':7} {rows['QAT']['nll_source']:8.4f}")
    for name, row in rows.items():
        print(f"{name:10} {row['kl_mean']:11.6f} {row['top1_agreement']:7.2%} {row['nll_quantized']:8.4f}")
    gains = {name: gain(results["QAT"].kl.mean(1), results[name].kl.mean(1)) for name in (*BASELINES, START)}
    for name, figures in gains.items():
        low, high = figures["interval"]
        print(f"KL of QAT lower than {name}'s by {figures['lower_by']:.1%} [{low:.1%}, {high:.1%}]")
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "gains": gains, "same_integers": same}, indent=2) + "\n")
    return 0 if same and min(gains[name]["lower_by"] for name in ("w4a8", RECIPE)) >= 1 / 3 else 1


if __name__ == "__main__":
    sys.exit(main())
