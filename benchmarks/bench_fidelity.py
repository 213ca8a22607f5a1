"""What quantization costs: validation NLL, KL to bf16 and right answers of bf16, W8A8, W4A8 and plain rounding.

    python benchmarks/bench_fidelity.py [--work DIR] [--questions N] [--skip-answers] [--json FILE]

NLL and KL are those of `glm5-ascend eval`: teacher-forced on the held-out text of the demo model, with the integer
arithmetic the server runs. Answers come from real vLLM on this CPU. Intervals: paired bootstrap over windows.
The second half repeats KL on the same model with planted activation outliers (same function, harder to quantize).
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from glm5_ascend.config import load_config
from glm5_ascend.demo_model.corpus import validation_texts
from glm5_ascend.evaluate.compare import Comparison, compare
from glm5_ascend.evaluate.metrics import metrics
from glm5_ascend.evaluate.windows import read_windows

WINDOW, ALL = 512, 10_000
RECIPES = ("w8a8", "w4a8", "rtn-w4a8")


def glm5_ascend(*arguments: str) -> None:
    quiet = subprocess.DEVNULL
    subprocess.run([sys.executable, "-m", "glm5_ascend", *arguments], check=True, stdout=quiet, stderr=quiet)


def make_checkpoints(work: Path, kind: str, factor: float) -> dict[str, Path]:
    """The float model and one checkpoint per recipe, made with the commands a user types."""
    shutil.rmtree(work / kind, ignore_errors=True)
    (work / kind).mkdir(parents=True)
    source = work / kind / "bf16"
    glm5_ascend("demo-model", str(source), *(["--outliers", str(factor)] if factor > 1 else []))
    made = {"bf16": source}
    for recipe in RECIPES:
        made[recipe] = work / kind / recipe
        glm5_ascend("quantize", str(source), str(made[recipe]), "--recipe", recipe, "--quiet")
        glm5_ascend("verify", str(made[recipe]), "--quiet")
    return made


def answers(directory: Path, questions: int) -> dict[str, Any]:
    """Share of held-out questions answered right by real vLLM, in a process of its own."""
    script = Path(__file__).with_name("answer_questions.py")
    done = subprocess.run(
        [sys.executable, str(script), str(directory), str(questions)], check=True, stdout=subprocess.PIPE, text=True
    )
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def table(checkpoints: dict[str, Path], questions: int) -> list[dict[str, Any]]:
    source = checkpoints["bf16"]
    windows = read_windows(None, validation_texts(), source, load_config(source), WINDOW, ALL)
    found = {name: compare(path, source, windows) for name, path in checkpoints.items() if path != source}
    # The reference against itself, which needs no second run: the figures are those of any comparison's reference.
    first = next(iter(found.values()))
    same, zero = torch.ones_like(first.same_top1), torch.zeros_like(first.kl)
    nll, right = first.nll_reference, first.right_reference
    found = {"bf16": Comparison(zero, nll, nll, same, right, right)} | found
    rows: list[dict[str, Any]] = []
    for name, directory in checkpoints.items():
        figures = {figure.name: figure for figure in metrics(found[name])}
        low, high = figures["nll_change"].interval or (0.0, 0.0)
        row = {
            "checkpoint": name, "positions": found[name].kl.numel(), "nll": figures["nll_quantized"].value,
            "nll_change": figures["nll_change"].value, "nll_change_low": low, "nll_change_high": high,
            "kl_mean": figures["kl_mean"].value, "kl_interval": figures["kl_mean"].interval,
            "top1_agreement": figures["top1_agreement"].value,
        }  # fmt: skip
        if questions:
            row["answers"] = answers(directory, questions)
        rows.append(row)
    return rows


def show(title: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{title} ({rows[0]['positions']} positions)")
    print(
        f"{'checkpoint':12} {'NLL':>8} {'change':>9} {'95 % interval':>20} {'KL to bf16':>11} {'top-1':>7} "
        f"{'right':>10}"
    )
    for row in rows:
        right = f"{row['answers']['right']}/{row['answers']['n']}" if "answers" in row else "-"
        span = f"[{row['nll_change_low']:+.3%}, {row['nll_change_high']:+.3%}]"
        print(
            f"{row['checkpoint']:12} {row['nll']:8.4f} {row['nll_change']:+9.3%} {span:>20} {row['kl_mean']:11.6f} "
            f"{row['top1_agreement']:7.2%} {right:>10}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("work/fidelity"))
    parser.add_argument("--questions", type=int, default=210)
    parser.add_argument("--skip-answers", action="store_true")
    parser.add_argument("--outliers", type=float, default=32.0, help="factor of the planted outliers")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    options = parser.parse_args()

    plain = table(make_checkpoints(options.work, "plain", 1.0), 0 if options.skip_answers else options.questions)
    show("demo model", plain)
    planted = table(make_checkpoints(options.work, "outliers", options.outliers), 0)
    show(f"demo model with planted outliers x{options.outliers:.0f}", planted)

    by_name = {row["checkpoint"]: row for row in plain}
    ratio = planted[-1]["kl_mean"] / planted[2]["kl_mean"]
    checks = {
        "W8A8 NLL within 0.5 % of bf16": abs(by_name["w8a8"]["nll_change"]) <= 0.005,
        "W4A8 NLL within 2 % of bf16": abs(by_name["w4a8"]["nll_change"]) <= 0.02,
        f"KL of plain rounding >= 3x ours on outliers (is {ratio:.1f}x)": ratio >= 3,
    }
    print()
    for text, ok in checks.items():
        print(f"{'ok  ' if ok else 'FAIL'} {text}")
    if options.json:
        options.json.write_text(json.dumps({"plain": plain, "outliers": planted, "checks": checks}, indent=2) + "\n")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
