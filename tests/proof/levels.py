"""One level of one op: `python -m tests.proof.levels LEVEL OP TOOLS`, results as JSON lines on standard output.

A process of its own, because TRITON_INTERPRET counts when the kernels are imported, and because the second level wants
triton-ascend where the first wants upstream Triton. TOOLS is the folder of the device's compilers.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from glm5_kernels.errors import UnsupportedVariantError
from glm5_kernels.parity import run
from tests.proof.device_compiler import TARGETS, DeviceCompiler
from tests.proof.lowering import lower_all
from tests.proof.shapes import launched_cases, quick_cases, real_cases
from tests.proof.tools import Tools

ROOT = Path(__file__).parents[2]
OPS = (
    "lightning_indexer",
    "lightning_indexer_quant",
    "sparse_flash_attention",
    "sparse_flash_attention_quant",
    "mla_preprocess",
)


@dataclass(frozen=True)
class Result:
    """One comparison.

    Attributes:
        what: the variant of the op, or the kernel and its compiler's options.
        worst: what is wrong, or the largest error.
    """

    op: str
    what: str
    ok: bool
    worst: str
    skipped: str = ""


def prove(level: str, op: str, tools: Tools | None) -> list[Result]:
    """Run it in its process.

    Raises:
        RuntimeError: the process ended before its last result.
    """
    paths = [str(ROOT), str(ROOT / "kernels")]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    if level != "interpreted":
        assert tools is not None
        paths.insert(0, str(tools.triton_ascend))
        environment.pop("TRITON_INTERPRET")
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.proof.levels", level, op, str(tools.device_compilers if tools else "")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f"{level} {op}: exit {done.returncode}\n{done.stderr[-3000:]}")
    return [Result(**json.loads(line)) for line in done.stdout.splitlines()]


def _interpreted(op: str) -> Iterator[Result]:
    """Every result of the interpreted kernels against the reference's."""
    from tests.proof import interpreter

    interpreter.correct()
    for case in itertools.chain(real_cases(op), quick_cases(op)):
        try:
            got = run.results(case, "triton", "cpu")
        except UnsupportedVariantError as error:
            yield Result(case.op, case.variant, True, "", str(error))
            continue
        for row in run.judge(case, "triton", got, run.results(case, "reference", "cpu")):
            yield Result(case.op, f"{case.variant}: {row.output}", row.ok, f"{row.worst}; allowed: {row.allowed}")


def _compiled(op: str, folder: Path) -> Iterator[Result]:
    """Every kernel that a server launches, for both targets, with and without multi-buffering."""
    compiler = DeviceCompiler(folder)
    for (name, _, constants), lowered in lower_all(launched_cases(op)).items():
        shape = " ".join(f"{key}={value}" for key, value in constants)
        for target, multi_buffer in itertools.product(TARGETS, (True, False)):
            compiled = compiler.compile(lowered, target, multi_buffer)
            what = f"{name} {shape}, {target}" + ("" if multi_buffer else ", single buffers")
            yield Result(op, what, bool(compiled.program), compiled.complaint)


if __name__ == "__main__":
    level, name, folder = sys.argv[1:]
    for line in _interpreted(name) if level == "interpreted" else _compiled(name, Path(folder)):
        print(json.dumps(asdict(line)), flush=True)
