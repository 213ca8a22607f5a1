"""The script for a GPU, on a machine without one: what it runs by Triton's interpreter, and what it says."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.command import ROOT, environment

#: The real case of one op on the CPU; then the same with a reference that is wrong.
PROGRAM = """
import json
from dataclasses import asdict
from glm5_kernels.parity import run
from tests.proof import interpreter, on_gpu
from tests.proof.shapes import quick_cases

interpreter.correct()
on_gpu.DEVICE = "cpu"
on_gpu.all_cases = lambda op: [case for case in quick_cases(op) if "decode, bfloat16, bf16 P" in case.variant][:1]
print(json.dumps([asdict(row) for row in on_gpu.on_gpu("sparse_flash_attention")]))
results = run._results
run._results = lambda case, name, where: [
    result + 1 if name == "reference" else result for result in results(case, name, where)
]
print(json.dumps([asdict(row) for row in on_gpu.on_gpu("sparse_flash_attention")]))
"""


def python(*arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, cwd=ROOT, env=environment(**extra)
    )


@pytest.mark.long
def test_every_case_runs_three_times_and_is_judged() -> None:
    done = python("-c", PROGRAM, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    right, wrong = (json.loads(line) for line in done.stdout.splitlines())
    assert [row["ok"] for row in right] == [True] * 6  # out and lse
    assert [row["ok"] for row in wrong] == [False] * 6


def test_without_a_gpu_it_says_so() -> None:
    done = python("-m", "tests.proof.on_gpu", CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (3, "no CUDA device, or a torch without CUDA")
