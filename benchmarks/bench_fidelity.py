"""What quantization costs: validation NLL, KL to bf16 and right answers of bf16 and of every recipe.

    python benchmarks/bench_fidelity.py [--work DIR] [--questions N] [--skip-answers] [--json FILE] [--peer PYTHON]

With `--peer`, the python of a virtual environment with msmodelslim==26.1.0 and transformers==5.4.0, msModelSlim makes
W4A8 and W8A8 from the same source and calibration text, and KL is also printed as a ratio to its KL, window by window.

NLL and KL are those of `glm5-ascend eval`: teacher-forced on the held-out text of the demo model, with the integer
arithmetic the server runs. Answers come from real vLLM on this CPU. Intervals: paired bootstrap over windows.
The second half repeats KL on the same model with planted activation outliers (same function, harder to quantize).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from glm5_ascend.config import load_config
from glm5_ascend.demo_model.corpus import validation_texts
from glm5_ascend.evaluate.compare import Comparison, compare
from glm5_ascend.evaluate.intervals import mean_interval
from glm5_ascend.evaluate.metrics import metrics
from glm5_ascend.evaluate.windows import read_windows

WINDOW, ALL = 512, 10_000
RECIPES = ("w8a8", "w8a8-best", "w4a8", "w4a8-best", "rtn-w4a8")
PEER = ("w8a8", "w4a8")
PEER_PROGRAM = """#!/bin/sh
exec "{python}" "{script}" "$@"
"""


def glm5_ascend(*arguments: str, path: Path | None = None) -> None:
    """Run our program; `path` is searched first for other programs."""
    environment = os.environ | ({"PATH": f"{path}:{os.environ['PATH']}"} if path else {})
    command = [sys.executable, "-m", "glm5_ascend", *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)


def peer_program(python: Path, work: Path) -> Path:
    """A folder with a program `msmodelslim` that runs on a CPU (`msmodelslim_cpu.py`)."""
    program = work / "bin" / "msmodelslim"
    program.parent.mkdir(parents=True, exist_ok=True)
    script = Path(__file__).with_name("msmodelslim_cpu.py").resolve()
    program.write_text(PEER_PROGRAM.format(python=python.absolute(), script=script))
    program.chmod(0o755)
    return program.parent.absolute()


def make_checkpoints(work: Path, kind: str, factor: float, peer: Path | None) -> dict[str, Path]:
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
    for recipe in PEER if peer else ():
        made[f"peer {recipe}"] = out = work / kind / f"peer-{recipe}"
        engine = ["--engine", "msmodelslim", "--device", "cpu"]
        glm5_ascend("quantize", str(source), str(out), "--recipe", recipe, *engine, path=peer_program(peer, work))
    return made


def ratio_to_peer(name: str, found: dict[str, Comparison]) -> dict[str, Any]:
    """KL of one of our recipes over that of msModelSlim's with the same bits; paired interval over windows."""
    theirs = found.get("peer w4a8" if "w4a8" in name else "peer w8a8")
    if theirs is None or name not in RECIPES:
        return {}
    ours, base = found[name].kl.mean(1), theirs.kl.mean(1)
    return {"kl_ratio": float(ours.mean() / base.mean()), "kl_ratio_interval": mean_interval(ours, base)}


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
        row |= ratio_to_peer(name, found)
        if questions:
            row["answers"] = answers(directory, questions)
        rows.append(row)
    return rows


def show(title: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{title} ({rows[0]['positions']} positions)")
    print(
        f"{'checkpoint':12} {'NLL':>8} {'change':>9} {'95 % interval':>20} {'KL to bf16':>11} {'top-1':>7} "
        f"{'right':>10} {'KL / msModelSlim':>24}"
    )
    for row in rows:
        right = f"{row['answers']['right']}/{row['answers']['n']}" if "answers" in row else "-"
        low, high = row.get("kl_ratio_interval") or (0.0, 0.0)
        ratio = f"{row['kl_ratio']:.2f} [{low:.2f}, {high:.2f}]" if "kl_ratio" in row else "-"
        span = f"[{row['nll_change_low']:+.3%}, {row['nll_change_high']:+.3%}]"
        print(
            f"{row['checkpoint']:12} {row['nll']:8.4f} {row['nll_change']:+9.3%} {span:>20} {row['kl_mean']:11.6f} "
            f"{row['top1_agreement']:7.2%} {right:>10} {ratio:>24}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("work/fidelity"))
    parser.add_argument("--questions", type=int, default=210)
    parser.add_argument("--skip-answers", action="store_true")
    parser.add_argument("--outliers", type=float, default=32.0, help="factor of the planted outliers")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    parser.add_argument("--peer", type=Path, help="python of a virtual environment with msmodelslim")
    options = parser.parse_args()

    plain = table(
        make_checkpoints(options.work, "plain", 1.0, options.peer), 0 if options.skip_answers else options.questions
    )
    show("demo model", plain)
    planted = table(make_checkpoints(options.work, "outliers", options.outliers, options.peer), 0)
    show(f"demo model with planted outliers x{options.outliers:.0f}", planted)

    by_name, hard = ({row["checkpoint"]: row for row in rows} for rows in (plain, planted))
    ratio = hard["rtn-w4a8"]["kl_mean"] / hard["w4a8"]["kl_mean"]
    checks = {
        "W8A8 NLL within 0.5 % of bf16": abs(by_name["w8a8"]["nll_change"]) <= 0.005,
        "W4A8 NLL within 2 % of bf16": abs(by_name["w4a8"]["nll_change"]) <= 0.02,
        f"KL of plain rounding >= 3x ours on outliers (is {ratio:.1f}x)": ratio >= 3,
    }
    if options.peer:
        worst = max(row["w4a8-best"]["kl_ratio"] for row in (by_name, hard))
        checks[f"KL of w4a8-best <= 0.7x msModelSlim's W4A8 (is {worst:.2f}x at worst)"] = worst <= 0.7
    print()
    for text, ok in checks.items():
        print(f"{'ok  ' if ok else 'FAIL'} {text}")
    if options.json:
        options.json.write_text(json.dumps({"plain": plain, "outliers": planted, "checks": checks}, indent=2) + "\n")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
