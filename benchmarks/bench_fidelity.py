"""What quantization costs: validation NLL, KL to bf16 and right answers of bf16, W8A8, W4A8 and plain rounding.

    python benchmarks/bench_fidelity.py [--work DIR] [--questions N] [--skip-answers] [--json FILE]

NLL and KL are teacher-forced on the held-out text of the demo model, with the integer arithmetic the server runs
(`glm5_ascend.model.stored`). Answers come from real vLLM on this CPU. Intervals: paired bootstrap over windows.
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

from glm5_ascend.demo_model.evaluate import validation_tokens
from glm5_ascend.model.stored import StoredModel

WINDOW = 512
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


def windows() -> list[torch.Tensor]:
    tokens = validation_tokens()
    return [torch.tensor(tokens[i : i + WINDOW]) for i in range(0, len(tokens) - WINDOW + 1, WINDOW)]


def per_window(directory: Path, sequences: list[torch.Tensor], reference: list[torch.Tensor] | None) -> dict[str, Any]:
    """Mean NLL and mean KL(reference || this) of each window, top-1 agreement, and the log-probabilities themselves."""
    logp = [logits[:-1].log_softmax(-1) for logits in StoredModel(directory).logits(sequences)]
    base = logp if reference is None else reference
    nll = [-lp.gather(1, s[1:, None]).mean() for lp, s in zip(logp, sequences, strict=True)]
    kl = [(b.exp() * (b - lp)).sum(-1).mean() for b, lp in zip(base, logp, strict=True)]
    top1 = [(b.argmax(-1) == lp.argmax(-1)).float().mean() for b, lp in zip(base, logp, strict=True)]
    return {"nll": torch.stack(nll), "kl": torch.stack(kl), "top1": torch.stack(top1), "logp": logp}


def interval(difference: torch.Tensor, draws: int = 10_000) -> tuple[float, float]:
    """95 % paired bootstrap interval of a mean over windows."""
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(len(difference), (draws, len(difference)), generator=generator)
    means = difference[picks].mean(1)
    return float(means.quantile(0.025)), float(means.quantile(0.975))


def answers(directory: Path, questions: int) -> dict[str, Any]:
    """Share of held-out questions answered right by real vLLM, in a process of its own."""
    script = Path(__file__).with_name("answer_questions.py")
    done = subprocess.run(
        [sys.executable, str(script), str(directory), str(questions)], check=True, stdout=subprocess.PIPE, text=True
    )
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def table(checkpoints: dict[str, Path], questions: int) -> list[dict[str, Any]]:
    sequences = windows()
    rows: list[dict[str, Any]] = []
    reference: dict[str, Any] | None = None
    for name, directory in checkpoints.items():
        found = per_window(directory, sequences, reference["logp"] if reference else None)
        reference = reference or found
        relative = (found["nll"] - reference["nll"]) / reference["nll"].mean()
        low, high = interval(relative)
        row = {
            "checkpoint": name, "positions": sum(len(s) - 1 for s in sequences), "nll": float(found["nll"].mean()),
            "nll_change": float(relative.mean()), "nll_change_low": low, "nll_change_high": high,
            "kl_mean": float(found["kl"].mean()), "kl_interval": interval(found["kl"]),
            "top1_agreement": float(found["top1"].mean()),
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
