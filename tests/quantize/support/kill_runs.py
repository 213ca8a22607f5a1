"""Kill a quantization again and again at random moments, start it again each time, and compare what comes out.

    python tests/quantize/support/kill_runs.py SRC CALIB FOLDER --kills 200 --seed 1

The heavy imports happen once: every attempt is a forked child, ended by SIGKILL. Prints how far the attempts came and
exits with 1 if the final bytes differ from those of a run that nobody disturbed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from glm5_ascend.quantize.job import prepare
from glm5_ascend.quantize.options import QuantizeOptions
from glm5_ascend.quantize.pipeline import quantize
from glm5_ascend.quantize.progress import silent
from glm5_kernels import ops, registry


def run(source: Path, calib: Path, out: Path) -> None:
    options = QuantizeOptions(source, out, "w4a8", calib=calib, samples=4, seq_len=64, threads=2)
    quantize(prepare(options), silent)


def start(source: Path, calib: Path, out: Path) -> int:
    """A child that quantizes; its process id."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            run(source, calib, out)
            code = 0
        finally:
            os._exit(code)
    return child


def digest(out: Path) -> str:
    whole = hashlib.sha256()
    for path in sorted(out.rglob("*")):
        if path.is_file():
            whole.update(path.relative_to(out).as_posix().encode() + path.read_bytes())
    return whole.hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("calib", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for choice in ops.report():  # numba takes longer to import than the run does
        registry.load(choice.op, choice.implementation)
    # Same folder name for both, because the provenance holds the output's name.
    whole, broken = args.folder / "whole" / "out", args.folder / "broken" / "out"
    whole.parent.mkdir(parents=True), broken.parent.mkdir(parents=True)
    began = time.monotonic()
    if os.waitpid(start(args.source, args.calib, whole), 0)[1]:
        return 1
    once = time.monotonic() - began
    chance, journal, lines = random.Random(args.seed), broken.parent / ".out.partial" / "journal.jsonl", []
    finished = 0
    while len(lines) < args.kills:
        child = start(args.source, args.calib, broken)
        # Short lives mostly, so that many kills fall into one run; some long ones, so that its end is hit as well.
        time.sleep(once * chance.choice((0.05, 0.1, 0.3, 1.0)) * (0.5 + chance.random()))
        os.kill(child, signal.SIGKILL)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) > 0:
            print(f"kill {len(lines)}: the attempt failed by itself")
            return 1
        if broken.exists():
            finished += 1
            if digest(broken) != digest(whole):
                print(f"kill {len(lines)}: other bytes")
                return 1
            for path in (broken, broken.parent / ".out.partial"):
                if path.exists():
                    path.rename(args.folder / f"{path.name}-{len(lines)}")
        lines.append(journal.read_text().count("\n") if journal.exists() else 0)
    if os.waitpid(start(args.source, args.calib, broken), 0)[1]:
        return 1
    same = digest(broken) == digest(whole)
    print(f"{args.kills} kills, units in the journal after each: {lines}")
    print(f"{finished} attempts were finished before the kill; same: {same}")
    return 0 if same and list(broken.parent.iterdir()) == [broken] else 1


if __name__ == "__main__":
    sys.exit(main())
