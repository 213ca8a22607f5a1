"""One level of one op: `python -m tests.proof.levels LEVEL OP TOOLS`, results as JSON lines on standard output.

A process of its own, because TRITON_INTERPRET counts when the kernels are imported, because levels 2 and 3 want
triton-ascend where level 1 wants upstream Triton, and because a wrong call at level 3 may end it. Level 4 is
`compiled` and level 5 `executed`: TOOLS is then the folder of the device's compilers.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from glm5_kernels.ascend.triton.launch import launched_by
from glm5_kernels.errors import UnsupportedVariantError
from glm5_kernels.parity import run
from glm5_kernels.parity.cases import Case, cases
from tests.proof import execute, structure
from tests.proof.device_compiler import TARGETS, VERSIONS, DeviceCompiler
from tests.proof.lowering import Lowered, lower
from tests.proof.shapes import REAL, executed_cases, launched_cases, quick_cases, real_cases
from tests.proof.tools import Tools

ROOT = Path(__file__).parents[2]
OPS = (
    "lightning_indexer",
    "lightning_indexer_quant",
    "sparse_flash_attention",
    "sparse_flash_attention_quant",
    "mla_preprocess",
)
LEVELS = ("interpreted", "lowered", "compiled", "executed")


@dataclass(frozen=True)
class Result:
    """One line of the table.

    Attributes:
        level: 1, 2, 3, 4 or 5.
        what: the variant of the op, at level 2 the kernel, at levels 4 and 5 the kernel, its compiler and options.
        relative: error over the whole output, None at levels 2 and 4; at level 5 the largest of all cases.
        asserted: what was compared or required.
    """

    op: str
    level: int
    what: str
    ok: bool
    relative: float | None
    worst: str
    asserted: str
    skipped: str = ""


#: Two vector instructions of one core write to the same bytes without an order.
SHARED_BUFFER = re.compile(r"written on (aiv[01]) V while \1 V writes")


def is_known_defect(result: Result) -> bool:
    """A defect of 1.1.0 that kernels/README.md names: a buffer of `score_pages`."""
    old = result.level == 5 and not result.ok and f", {VERSIONS[1]}" in result.what
    return old and result.what.startswith("score_pages") and SHARED_BUFFER.search(result.worst) is not None


def prove(level: str, op: str, tools: Tools | None) -> list[Result]:
    """Run it in its process.

    Args:
        level: `interpreted` (1), `lowered` (2 and 3), `compiled` (4) or `executed` (5).
    Raises:
        RuntimeError: the process ended before its last result.
    """
    paths = [str(ROOT), str(ROOT / "kernels")]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    if level != "interpreted":
        if tools is None:
            raise ValueError("levels 2 to 5 need the tools")
        paths.insert(0, str(tools.triton_ascend))
        environment.pop("TRITON_INTERPRET")
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.proof.levels", level, op, str(_folder(level, tools))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f"{level} {op}: exit {done.returncode}\n{done.stderr[-3000:]}")
    return [Result(**json.loads(line)) for line in done.stdout.splitlines()]


def _folder(level: str, tools: Tools | None) -> Path | str:
    if tools is None:
        return ""
    return tools.llvm if level == "lowered" else tools.device_compilers


def compared(cases: Iterable[Case], level: int, device: str = "cpu", runs: int = 1) -> Iterator[Result]:
    """Every result of the Triton kernels on a device against the reference's, of as many runs."""
    for case in cases:
        try:
            got = [run._results(case, "triton", device) for _ in range(runs)]
        except UnsupportedVariantError as error:
            yield Result(case.op, level, case.variant, True, None, "", "", str(error))
            continue
        want = run._results(case, "reference", "cpu")
        for number, results in enumerate(got, 1):
            for row in run._judge(case, "triton", results, want):
                what = f"{case.variant}: {row.output}" + (f", run {number}" if runs > 1 else "")
                yield Result(case.op, level, what, row.ok, row.relative, row.worst, row.allowed)


def _interpreted(op: str) -> Iterator[Result]:
    from tests.proof import interpreter

    interpreter.correct()
    yield from compared(real_cases(op), 1)
    yield from compared(quick_cases(op), 1)


def _lowered(op: str, llvm: Path) -> Iterator[Result]:
    kernels: dict[Any, Lowered] = {}

    def launch(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        types = tuple(a.dtype if isinstance(a, torch.Tensor) else type(a) for a in arguments)
        key = kernel.__name__, types, tuple(constants.items())
        if key not in kernels:
            kernels[key] = lower(kernel, arguments, constants)
        execute.run(compiler.library(kernels[key]), kernels[key], grid, arguments)

    with tempfile.TemporaryDirectory() as folder, launched_by(launch):
        compiler = execute.Compiler(llvm, Path(folder))
        yield from compared(real_cases(op), 3)
        for lowered in kernels.values():
            wrong = structure.findings(lowered)
            asserted = structure.expected(lowered).in_words()
            yield Result(op, 2, f"{REAL}: {lowered.kernel}", not wrong, None, "; ".join(wrong), asserted)
        yield from compared(cases(0, [op]), 3)


def _compiled(op: str, folder: Path) -> Iterator[Result]:
    """Every kernel that a server launches, by every compiler, for both targets, with and without multi-buffering."""
    kernels: dict[Any, Lowered] = {}

    def launch(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        types = tuple(a.dtype if isinstance(a, torch.Tensor) else type(a) for a in arguments)
        key = kernel.__name__, types, tuple(constants.items())
        if key not in kernels:
            kernels[key] = lower(kernel, arguments, constants)

    with launched_by(launch):
        for case in launched_cases(op):
            run._results(case, "triton", "cpu")
    compilers = [DeviceCompiler(folder, version) for version in VERSIONS]
    for (name, _, constants), lowered in kernels.items():
        shape = " ".join(f"{key}={value}" for key, value in constants)
        for compiler, target, multi_buffer in itertools.product(compilers, TARGETS, (True, False)):
            compiled = compiler.compile(lowered, target, multi_buffer)
            wrong = compiled.findings()
            what = f"{name} {shape}, {target}, {compiler.version}" + ("" if multi_buffer else ", single buffers")
            words = compiled.in_words() + f"; {compiled.seconds:.1f} s"
            yield Result(op, 4, what, not wrong, None, "; ".join(wrong), words)


def _executed(op: str, folder: Path) -> Iterator[Result]:
    """Every kernel that a server launches as its compiled program, in several orders."""
    from tests.proof.executed.prove import prove_op

    for program in prove_op(list(executed_cases(op)), folder):
        words = f"{program.asserted()}; {program.seconds:.0f} s"
        yield Result(op, 5, program.what, not program.wrong, program.relative, "; ".join(program.wrong[:5]), words)


RUN = {
    "interpreted": lambda op, _: _interpreted(op),
    "lowered": _lowered,
    "compiled": _compiled,
    "executed": _executed,
}

if __name__ == "__main__":
    level, name, folder = sys.argv[1:]
    for line in RUN[level](name, Path(folder)):
        print(json.dumps(asdict(line)), flush=True)
