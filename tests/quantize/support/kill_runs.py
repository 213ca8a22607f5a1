"""Kill a quantization again and again at random moments, start it again each time, and compare what comes out.

    python tests/quantize/support/kill_runs.py SRC CALIB FOLDER RECIPE KILLS

The heavy imports happen once: every attempt is a forked child, ended by SIGKILL.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from glm5_ascend.quantize import quantize
from glm5_kernels import ops, registry


def run(source: Path, calib: Path, recipe: str, out: Path) -> None:
    quantize(source, out, recipe=recipe, calib=calib, samples=4, seq_len=64, threads=2)


def start(source: Path, calib: Path, recipe: str, out: Path) -> int:
    """A child that quantizes; its process id."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            run(source, calib, recipe, out)
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


def main(source: Path, calib: Path, folder: Path, recipe: str, kills: int) -> None:
    torch.set_num_threads(1)
    for choice in ops.report():  # the library takes longer to load than the run does
        registry.load(choice.op, choice.implementation)
    # Same folder name for both, because the provenance holds the output's name.
    whole, broken = folder / "whole" / "out", folder / "broken" / "out"
    whole.parent.mkdir(parents=True), broken.parent.mkdir(parents=True)
    began = time.monotonic()
    assert os.waitpid(start(source, calib, recipe, whole), 0)[1] == 0
    once, chance = time.monotonic() - began, random.Random(0)
    for number in range(kills):
        child = start(source, calib, recipe, broken)
        # Short lives mostly, so that many kills fall into one run; some long ones, so that its end is hit as well.
        time.sleep(once * chance.choice((0.05, 0.1, 0.3, 1.0)) * (0.5 + chance.random()))
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) <= 0, "the attempt failed by itself"
        if broken.exists():
            assert digest(broken) == digest(whole)
            for path in (broken, broken.parent / ".out.partial"):
                if path.exists():
                    path.rename(folder / f"{path.name}-{number}")
    assert os.waitpid(start(source, calib, recipe, broken), 0)[1] == 0
    assert digest(broken) == digest(whole)
    assert list(broken.parent.iterdir()) == [broken]


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]), sys.argv[4], int(sys.argv[5]))
