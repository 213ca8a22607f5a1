"""Loss by quantization: KL to bf16, NLL and right answers of every recipe, on several models and calibration texts.

    python benchmarks/report_fidelity.py [--work DIR] [--second DIR] [--peer PYTHON] [--seeds N]

Models: the demo model; the same with planted activation outliers (same function, harder to quantize); the small trained
GLM-5.3-Flash; with --second, one trained with another seed on other data
(`python -m benchmarks.training.train DIR --seed 7 --text-share 0.6`); and SmolLM2-135M, a real language model, on three
kinds of text.
With --peer, the python of a virtual environment with msmodelslim==26.1.0 and transformers==5.4.0, msModelSlim makes
W4A8 and W8A8 from the same sources and calibration texts, and KL is also given as a ratio to its KL, window by window.

NLL and KL are those of `glm5-ascend eval`: teacher-forced on the held-out text of the demo model, with the integer
arithmetic the server runs. The first seed calibrates on the bundled text, the others on texts drawn from the training
data.
Answers come from real vLLM on this CPU. Intervals: paired bootstrap over windows.

Checkpoints in --work are reused: a second run resumes, or only measures.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from tools.fidelity_checkpoints import (
    calibration,
    make_demo,
    plain_flash,
    quantized,
    quantized_by_peer,
)  # fmt: skip
from tools.smollm2_table import RealRow, smollm2_checks, smollm2_table

from glm5_ascend.fidelity.evaluation.compare import FidelityComparison, compare
from glm5_ascend.fidelity.evaluation.metrics import Interval, Metric, mean_interval, metrics
from glm5_ascend.fidelity.evaluation.windows import read_tasks

WINDOW = 512
#: Recipe -> msModelSlim's with the same bits.
RECIPES = {
    "w4a8-best": "w4a8", "w4a8": "w4a8", "w4a8-mlapo": "w4a8", "rtn-w4a8": "w4a8",
    "w8a8-best": "w8a8", "w8a8": "w8a8",
}  # fmt: skip
#: Plain rounding, the control: it needs no text.
CONTROL = "rtn-w4a8"
PEER = "w4a8", "w8a8"
#: What --models takes, and its title.
MODELS = {
    "demo": "demo model", "outliers": "with outliers", "second": "second model", "flash": "GLM-5.3-Flash",
    "smollm2": "SmolLM2-135M",
}  # fmt: skip
#: Recipe of GLM-5.3-Flash -> whether it is calibrated.
FLASH_RECIPES = {"flash-w4a8": False, "flash-w4a8-best": True, "flash-w8a8": False}


@dataclass
class Row:
    """One line of the table; `comparisons`: per calibration text."""

    name: str
    comparisons: list[FidelityComparison]
    ratio: float | None = None
    ratio_interval: Interval = None
    answers: dict[str, Any] | None = None

    @cached_property
    def figures(self) -> dict[str, Metric]:
        """Figures of the first calibration text, by name."""
        return {figure.name: figure for figure in metrics(self.comparisons[0])}

    @property
    def kl(self) -> list[float]:
        return [float(comparison.kl.mean()) for comparison in self.comparisons]

    @property
    def by_window(self) -> torch.Tensor:
        """Mean KL of every window over the calibration texts."""
        return torch.stack([comparison.kl.mean(1) for comparison in self.comparisons]).mean(0)

    def compare_with(self, other: Row) -> None:
        """Ratio of KL over the texts that both have."""
        shared = min(len(self.comparisons), len(other.comparisons))
        ours, theirs = (Row(row.name, row.comparisons[:shared]).by_window for row in (self, other))
        self.ratio, self.ratio_interval = float(ours.mean() / theirs.mean()), mean_interval(ours, theirs)


def answers(directory: Path, questions: int) -> dict[str, Any]:
    """Share of held-out questions answered right by real vLLM, in a process of its own."""
    script = Path(__file__).with_name("report_answers.py")
    done = subprocess.run(
        [sys.executable, str(script), str(directory), str(questions)], check=True, stdout=subprocess.PIPE, text=True
    )
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def table(source: Path, work: Path, options: argparse.Namespace, questions: int) -> list[Row]:
    """All recipes on one model."""
    work.mkdir(exist_ok=True)
    windows = read_tasks(None, source, WINDOW, options.windows).windows
    texts = [calibration(options.work, seed) for seed in range(options.seeds)]
    rows: dict[str, Row] = {}
    for recipe in PEER if options.peer else ():
        paths = [
            quantized_by_peer(
                source, work / f"peer-{recipe}-{i}", recipe, options.peer, calib=text[1] if text else None
            )
            for i, text in enumerate(texts)
        ]
        rows[f"peer {recipe}"] = Row(f"msModelSlim {recipe}", [compare(path, source, windows) for path in paths])
    for recipe, peer in RECIPES.items():
        row_texts = texts[:1] if recipe == CONTROL else texts
        paths = [quantized(source, work / f"{recipe}-{i}", recipe, text) for i, text in enumerate(row_texts)]
        rows[recipe] = row = Row(recipe, [compare(path, source, windows) for path in paths])
        if f"peer {peer}" in rows:
            row.compare_with(rows[f"peer {peer}"])
        if questions:
            row.answers = answers(paths[0], questions)
    return list(rows.values())


def flash_table(source: Path, work: Path, options: argparse.Namespace) -> list[Row]:
    """GLM-5.3-Flash's recipes; ratios are to plain rounding."""
    work.mkdir(exist_ok=True)
    windows = read_tasks(None, source, WINDOW, options.windows).windows
    texts = [calibration(options.work, seed) for seed in range(options.seeds)]
    control = quantized(source, work / "rtn", str(plain_flash(options.work)), [])
    rows = [Row("plain rounding", [compare(control, source, windows)] * len(texts))]
    for recipe, calibrated in FLASH_RECIPES.items():
        paths = [
            quantized(source, work / f"{recipe}-{i}", recipe, text)
            for i, text in enumerate(texts if calibrated else [[]])
        ]
        rows.append(Row(recipe, [compare(path, source, windows) for path in paths]))
        rows[-1].compare_with(rows[0])
    return rows


def show(title: str, rows: list[Row]) -> None:
    first = rows[0].comparisons[0]
    print(f"\n{title} ({first.kl.numel()} positions; bf16: NLL {first.nll_reference.mean():.4f})")
    print(
        f"{'':27} {'KL to bf16':>10} {'by seed':>24} {'ratio':>19} {'NLL':>7} {'95 % interval':>16} "
        f"{'top-1':>6} {'right':>7}"
    )
    for row in rows:
        (low, high), change = row.figures["nll_change"].interval or (0.0, 0.0), row.figures["nll_change"].value
        seeds = " ".join(f"{kl:.5f}" for kl in row.kl) if len(row.kl) > 1 else ""
        ratio = ""
        if row.ratio is not None:
            a, b = row.ratio_interval or (0.0, 0.0)
            ratio = f"{row.ratio:.2f} [{a:.2f}, {b:.2f}]"
        right = f"{row.answers['right']}/{row.answers['n']}" if row.answers else ""
        print(
            f"{row.name:27} {sum(row.kl) / len(row.kl):10.6f} {seeds:>24} {ratio:>19} {change:+7.2%} "
            f"{f'[{low:+.2%}, {high:+.2%}]':>16} {row.figures['top1_agreement'].value:6.1%} {right:>7}",
            flush=True,
        )


def checks(tables: dict[str, list[Row]], peer: bool) -> dict[str, bool]:
    by_name = {title: {row.name: row for row in rows} for title, rows in tables.items()}
    results: dict[str, bool] = {}

    def change(row: Row) -> float:
        return abs(row.figures["nll_change"].value)

    if plain := by_name.get(MODELS["demo"]):
        results["W8A8 NLL within 0.5 % of bf16"] = change(plain["w8a8"]) <= 0.005
        results["W4A8 NLL within 2 % of bf16"] = change(plain["w4a8"]) <= 0.02
    if hard := by_name.get(MODELS["outliers"]):
        gain = hard["rtn-w4a8"].kl[0] / hard["w4a8"].kl[0]
        results[f"KL of plain rounding >= 3x ours on outliers (is {gain:.1f}x)"] = gain >= 3
    if flash := by_name.pop(MODELS["flash"], None):
        interval = flash["flash-w4a8-best"].ratio_interval or (1.0, 1.0)
        results["GLM-5.3-Flash: flash-w4a8-best has less KL than plain rounding"] = interval[1] < 1
    for title, rows in by_name.items() if peer else ():
        best, eight = rows["w4a8-best"], rows["w8a8-best"]
        assert best.ratio is not None and eight.ratio is not None
        results[f"{title}: KL of w4a8-best <= 0.7x msModelSlim's W4A8 (is {best.ratio:.2f}x)"] = best.ratio <= 0.7
        results[f"{title}: KL of w8a8-best <= 0.4x msModelSlim's W8A8 (is {eight.ratio:.2f}x)"] = eight.ratio <= 0.4
        worse = [name for name in RECIPES if name != CONTROL and (rows[name].ratio_interval or (0.0, 0.0))[0] > 1]
        results[f"{title}: no recipe is worse than msModelSlim's ({', '.join(worse) or 'none'})"] = not worse
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("work/fidelity"))
    parser.add_argument("--second", type=Path, help="another trained model, with the same vocabulary size")
    parser.add_argument("--models", nargs="+", choices=MODELS, help="only these")
    parser.add_argument("--peer", type=Path, help="python of a virtual environment with msmodelslim")
    parser.add_argument("--seeds", type=int, default=1, help="calibration texts (default %(default)s)")
    parser.add_argument("--windows", type=int, default=10_000, help="of 512 tokens, at most; default: all")
    parser.add_argument("--questions", type=int, default=210, help="for vLLM to answer, 0 for none")
    parser.add_argument("--outliers", type=float, default=32.0, help="factor of the planted outliers")
    options = parser.parse_args()

    options.work.mkdir(parents=True, exist_ok=True)
    if "second" in (options.models or ()) and not options.second:
        parser.error("--models second needs --second DIR")
    names = [name for name in options.models or MODELS if name != "second" or options.second]
    tables: dict[str, list[Row]] = {}
    real: list[RealRow] = []
    for name in names:
        if name == "smollm2":
            source = make_demo(options.work / name, model=name)
            real = smollm2_table(source, options.work / "of-smollm2", options.windows, options.peer)
            continue
        if name == "flash":
            source = make_demo(options.work / "flash", model="glm-5.3-flash")
            tables[MODELS[name]] = flash_table(source, options.work / "of-flash", options)
            show(MODELS[name], tables[MODELS[name]])
            continue
        if name == "second":
            source = options.second
        elif name == "demo":
            source = make_demo(options.work / "demo")
        else:
            source = make_demo(options.work / f"outliers-{options.outliers:g}", options.outliers)
        questions = options.questions if name == "demo" else 0
        tables[MODELS[name]] = table(source, options.work / f"of-{source.name}", options, questions)
        show(MODELS[name], tables[MODELS[name]])
    results = checks(tables, bool(options.peer)) | (smollm2_checks(real) if real else {})
    print("\n" + "\n".join(f"{'ok  ' if ok else 'FAIL'} {text}" for text, ok in results.items()))
    return 0 if all(results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
