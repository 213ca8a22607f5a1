"""The Triton kernels on an NVIDIA GPU: `PYTHONPATH=.:kernels python -m tests.proof.on_gpu [OP ...]`.

Upstream Triton compiles them. It is no Ascend: another compiler, other memories. It shows what no level on a CPU does:
the kernels' source on hardware that runs the programs of a launch at once, at GLM-5's sizes. Every case runs three
times, each result is judged. A line per result, one process per op. Exit code 1 if one is wrong, 3 without a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch

from glm5_kernels.ascend.triton.launch import launched_by
from glm5_kernels.errors import UnsupportedVariantError
from glm5_kernels.parity.cases import Case, cases
from tests.proof.levels import OPS, Result, compared
from tests.proof.shapes import executed_cases, launched_cases, real_cases
from tests.proof.table import details

RUNS = 3
DEVICE = "cuda"
#: Their tiles are an Ascend's: two stages of them are more than a GPU's shared memory holds. fp32 products in fp32.
OPTIONS = {"num_stages": 1, "num_warps": 8}
EXACT = {"TRITON_F32_DEFAULT": "ieee"}


def all_cases(op: str) -> Iterator[Case]:
    """Those of levels 1 and 3 and of `glm5-ascend parity`, and those of levels 4 and 5."""
    yield from real_cases(op)
    yield from cases(0, [op])
    yield from launched_cases(op)
    yield from executed_cases(op)


def _launch(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    from triton.runtime.errors import OutOfResources

    try:
        kernel[grid](*arguments, **constants, **OPTIONS)
    except OutOfResources as error:
        raise UnsupportedVariantError(f"its tiles are too large for this GPU: {error}") from None


def on_gpu(op: str) -> Iterator[Result]:
    with launched_by(_launch):
        yield from compared(all_cases(op), 6, DEVICE, RUNS)


def main(wanted: list[str]) -> int:
    if not torch.cuda.is_available():
        print("no CUDA device, or a torch without CUDA", file=sys.stderr)
        return 3
    command = [sys.executable, "-m", "tests.proof.on_gpu", "--in-process"]
    environment = os.environ | EXACT
    running = {
        op: subprocess.Popen([*command, op], stdout=subprocess.PIPE, text=True, env=environment) for op in wanted or OPS
    }
    results: list[Result] = []
    for op, process in running.items():
        lines, _ = process.communicate()
        found = [Result(**json.loads(line)) for line in lines.splitlines()]
        if process.returncode:
            found.append(Result(op, 6, "its process", False, None, f"exit {process.returncode}", "all cases"))
        print("\n".join(details(found)), flush=True)
        results += found
    for op in running:
        compared = [r for r in results if r.op == op and not r.skipped]
        skipped = sum(bool(r.skipped) for r in results if r.op == op)
        worst = max((r.relative for r in compared if r.relative is not None), default=0.0)
        passed = sum(r.ok for r in compared)
        print(f"{op}: {passed} of {len(compared)} results, {skipped} cases not for it, largest error {worst:.1e}")
    print(f"on {torch.cuda.get_device_name()}")
    return 0 if all(r.ok for r in results) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--in-process"]:
        for line in on_gpu(sys.argv[2]):
            print(json.dumps(asdict(line)), flush=True)
    else:
        sys.exit(main(sys.argv[1:]))
