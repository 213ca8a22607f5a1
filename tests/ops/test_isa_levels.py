"""The ops as older CPUs run them: numba is told to compile for one of those.

torch keeps its own instructions here: the results are compared, not the speed.
"""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
from llvmlite.binding import get_host_cpu_features

from glm5_kernels.compiled.processor import restricted_to
from tests.support.command import ROOT, environment

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="restricts an x86-64 CPU")
#: CPUs whose int8 products use another instruction.
OTHERS = [name for name, feature in (("alderlake", "avxvnni"),) if get_host_cpu_features().get(feature)]
QUANTIZER = ("methods", "calibration", "training", "test_pipeline.py", "run/test_expert.py", "run/test_not_finite.py")
#: They start processes for other CPUs, or Triton's interpreter, themselves.
LEFT_OUT = ("test_isa_levels.py", "test_register_widths.py", "test_bad_operands.py")


def passes(name: str, folder: Path, *files: str, least: int) -> None:
    """Run these tests as the CPU `name`; at least so many pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not long", *files]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT,
        env=environment() | restricted_to(name) | {"NUMBA_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) >= least


def test_int8_products_of_a_cpu_with_avx2(tmp_path: Path) -> None:
    passes("haswell", tmp_path, "tests/ops/test_int8_product.py::test_sums_are_exact", least=28)


@pytest.mark.long
@pytest.mark.parametrize("name", OTHERS)
def test_int8_products(name: str, tmp_path: Path) -> None:
    passes(name, tmp_path, "tests/ops/test_int8_product.py", "tests/ops/test_int8_quantize.py", least=80)


@pytest.mark.long
def test_all_ops_of_a_cpu_with_avx2(tmp_path: Path) -> None:
    files = [path for path in sorted((ROOT / "tests" / "ops").glob("test_*.py")) if path.name not in LEFT_OUT]
    passes("haswell", tmp_path, *(str(path.relative_to(ROOT)) for path in files), least=400)


@pytest.mark.long
def test_quantizer_of_a_cpu_with_avx2(tmp_path: Path) -> None:
    passes("haswell", tmp_path, *(f"tests/quantize/{part}" for part in QUANTIZER), least=100)


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
    passes("haswell", tmp_path, "tests/serve/test_quantized.py", "tests/serve/test_chat.py", least=5)
