"""The ops as older CPUs run them: numba is told to compile for one of those, or the other register width is forced.

torch keeps its own instructions here: the results are compared, not the speed.
"""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest
from llvmlite.binding import get_host_cpu_features

from glm5_kernels.compiled import simd
from glm5_kernels.compiled.processor import restricted_to
from tests.support.command import ROOT, environment

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="restricts an x86-64 CPU")
#: CPUs whose int8 products use another instruction.
OTHERS = [name for name, feature in (("alderlake", "avxvnni"),) if get_host_cpu_features().get(feature)]
QUANTIZER = ("methods", "calibration", "training", "test_pipeline.py", "run/test_expert.py", "run/test_not_finite.py")
OP_TESTS = sorted((ROOT / "tests" / "ops").glob("test_*.py"))
#: They start processes for other CPUs themselves.
LEFT_OUT = ("test_isa_levels.py", "test_bad_operands.py")
#: HEADS and GROUPS of `compiled.simd`: the registers that this CPU does not choose by itself.
OTHER_WIDTH = ("4", "1") if simd.HEADS == 8 else ("8", "2")


def passes(command: list[str], variables: dict[str, str], folder: Path) -> str:
    """Run these tests with compiled code in `folder`; pytest's output."""
    done = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, check=False, cwd=ROOT,
        env=environment() | variables | {"NUMBA_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:] + done.stderr[-2000:]
    return done.stdout


#: CPU, tests, whether they run in `make test`. torch multiplies the server's bf16 linear layers in a loop there.
RUNS = [
    ("haswell", ["tests/ops/test_int8_product.py::test_sums_are_exact"], True),
    ("haswell", [f"tests/ops/{path.name}" for path in OP_TESTS if path.name not in LEFT_OUT], False),
    ("haswell", [f"tests/quantize/{part}" for part in QUANTIZER], False),
    ("haswell", ["tests/serve/test_quantized.py", "tests/serve/test_chat.py"], False),
    *((name, ["tests/ops/test_int8_product.py", "tests/ops/test_int8_quantize.py"], False) for name in OTHERS),
]


@pytest.mark.parametrize(
    ("name", "files"), [pytest.param(*run, marks=[] if quick else [pytest.mark.long]) for *run, quick in RUNS]
)
def test_on_another_cpu(name: str, files: list[str], tmp_path: Path) -> None:
    if "serve" in files[0]:
        pytest.importorskip("vllm")
    command = ["pytest", "-q", "-p", "no:cacheprovider", "-m", "not long", *files]
    passes(command, restricted_to(name), tmp_path)


@pytest.mark.parametrize("chosen", ["large_scores", pytest.param("", marks=pytest.mark.long)])
def test_indexer_and_attention_in_the_other_register_width(chosen: str, tmp_path: Path) -> None:
    """512-bit sums (pairs of bf16 included) where the processor lacks the registers, else 256-bit ones."""
    command = ["tests.ops.support.width", *OTHER_WIDTH, "tests/ops/test_compiled_attention.py", "-k", chosen]
    output = passes(command, {}, tmp_path)
    assert chosen or OTHER_WIDTH == ("4", "1") or "skipped" not in output  # the pairs were run


@pytest.mark.long
def test_reference_on_a_cpu_without_avx2() -> None:
    """auto runs the references there."""
    code = "from glm5_kernels import ops; print({choice.implementation for choice in ops.report()})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT,
        env=environment() | restricted_to("nehalem"),
    )  # fmt: skip
    assert done.stdout.strip() == "{'reference'}"
