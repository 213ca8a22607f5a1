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
#: They start processes for other CPUs, or Triton's interpreter, themselves.
LEFT_OUT = ("test_isa_levels.py", "test_bad_operands.py")
HASWELL = restricted_to("haswell")
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


def pytest_of(*files: str) -> list[str]:
    return ["pytest", "-q", "-p", "no:cacheprovider", "-m", "not long", *files]


def test_int8_products_of_a_cpu_with_avx2(tmp_path: Path) -> None:
    passes(pytest_of("tests/ops/test_int8_product.py::test_sums_are_exact"), HASWELL, tmp_path)


def test_attention_in_the_other_register_width(tmp_path: Path) -> None:
    command = ["tests.ops.support.width", *OTHER_WIDTH, "tests/ops/test_compiled_attention.py", "-k", "large_scores"]
    passes(command, {}, tmp_path)


@pytest.mark.long
def test_indexer_and_attention_in_the_other_register_width(tmp_path: Path) -> None:
    """512-bit sums (pairs of bf16 included) where the processor lacks the registers, else 256-bit ones."""
    output = passes(["tests.ops.support.width", *OTHER_WIDTH, "tests/ops/test_compiled_attention.py"], {}, tmp_path)
    assert OTHER_WIDTH == ("4", "1") or "skipped" not in output  # the pairs were run


@pytest.mark.long
@pytest.mark.parametrize("name", OTHERS)
def test_int8_products(name: str, tmp_path: Path) -> None:
    files = "tests/ops/test_int8_product.py", "tests/ops/test_int8_quantize.py"
    passes(pytest_of(*files), restricted_to(name), tmp_path)


@pytest.mark.long
def test_all_ops_of_a_cpu_with_avx2(tmp_path: Path) -> None:
    files = [path for path in sorted((ROOT / "tests" / "ops").glob("test_*.py")) if path.name not in LEFT_OUT]
    passes(pytest_of(*(str(path.relative_to(ROOT)) for path in files)), HASWELL, tmp_path)


@pytest.mark.long
def test_quantizer_of_a_cpu_with_avx2(tmp_path: Path) -> None:
    passes(pytest_of(*(f"tests/quantize/{part}" for part in QUANTIZER)), HASWELL, tmp_path)


@pytest.mark.long
def test_reference_on_a_cpu_without_avx2() -> None:
    """auto runs the references there."""
    code = "from glm5_kernels import ops; print({choice.implementation for choice in ops.report()})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT,
        env=environment() | restricted_to("nehalem"),
    )  # fmt: skip
    assert done.stdout.strip() == "{'reference'}"


@pytest.mark.long
def test_server_of_a_cpu_with_avx2(tmp_path: Path) -> None:
    """Its bf16 linear layers, too, which torch multiplies in a loop there."""
    pytest.importorskip("vllm")
    passes(pytest_of("tests/serve/test_quantized.py", "tests/serve/test_chat.py"), HASWELL, tmp_path)
