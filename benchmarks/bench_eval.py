"""Seconds of `eval` of this tree and of another one on the same checkpoints, each in its own process, in turns.

    python benchmarks/bench_eval.py OUT --against SRC [--before TREE] [--windows 20] [--rounds 2] [--threads 2] [--cold]

Windows have 128 tokens. Prints wall and processor seconds, peak memory, the prediction, and the figures. `--cold`
first gives the pages of the files back to the system, so that they are read from the disk. Exit 1 if two runs' figures
differ by more than fp32 sums in another order do.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parents[1]
FIGURES = ("kl_mean", "nll_source", "nll_quantized", "top1_agreement")
SAME = 1e-3  # relative


@dataclass
class Run:
    """One process; peak in bytes."""

    seconds: float
    processors: float
    peak: int
    predicted: str
    figures: dict[str, float]


def run(tree: Path, out: Path, source: Path, windows: int, threads: int) -> Run:
    """Run `eval` of a tree; ends the program if it fails."""
    command = [sys.executable, "-m", "glm5_ascend", "eval", out, "--against", source, "--window", 128]
    command += ["--windows", windows]
    cores = sorted(os.sched_getaffinity(0))[: threads or None]
    with tempfile.TemporaryFile("w+") as answer, tempfile.TemporaryFile("w+") as log:
        began = time.perf_counter()
        process = subprocess.Popen(
            [*map(str, command), "--json"], stdout=answer, stderr=log, cwd=tree,
            env=os.environ | {"PYTHONPATH": f"{tree}:{tree / 'kernels'}"},
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )  # fmt: skip
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
        log.seek(0)
        answer.seek(0)
        lines = log.read().splitlines()
        if status:
            sys.exit("\n".join([f"{tree}: exit status {status}", *lines[-20:]]))
        report = json.load(answer)
    predicted = next((line for line in lines if line.startswith("predicted: ")), "")
    figures = {name: report[name] for name in FIGURES}
    return Run(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, predicted, figures)


def forget(directory: Path) -> None:
    """Give the pages of a checkpoint's files back to the system."""
    for path in directory.glob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--against", type=Path, required=True)
    parser.add_argument("--before", type=Path, help="a checkout of another commit")
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=0, help="cores to use; 0: all")
    parser.add_argument("--cold", action="store_true")
    args = parser.parse_args()
    trees = {"before": args.before, "this tree": HERE} if args.before else {"this tree": HERE}
    runs: dict[str, list[Run]] = {name: [] for name in trees}
    for _ in range(args.rounds):
        for name, tree in trees.items():
            if args.cold:
                forget(args.out)
                forget(args.against)
            runs[name].append(run(tree, args.out.absolute(), args.against.absolute(), args.windows, args.threads))
    print("| | seconds | of processors | peak memory, GB |\n|---|---|---|---|")
    middle = {}
    for name, some in runs.items():
        middle[name] = statistics.median(one.seconds for one in some)
        processors, peak = statistics.median(one.processors for one in some), max(one.peak for one in some)
        times = ", ".join(f"{one.seconds:.1f}" for one in some)
        print(f"| {name} | {middle[name]:.1f} ({times}) | {processors:.1f} | {peak / 1e9:.2f} |")
    every = [one for some in runs.values() for one in some]
    print("\n".join({one.predicted: None for one in every if one.predicted}))
    print("figures:", ", ".join(f"{name} {value:.6g}" for name, value in every[-1].figures.items()))
    if args.before:
        print(f"before / this tree: {middle['before'] / middle['this tree']:.2f}")
    off = max(abs(one.figures[f] / every[0].figures[f] - 1) for one in every for f in FIGURES if every[0].figures[f])
    print(f"largest relative difference of a figure: {off:.1e}")
    return 1 if off > SAME else 0


if __name__ == "__main__":
    sys.exit(main())
