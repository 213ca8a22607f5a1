"""The ops as processors without AVX-512, and without AVX, run them: numba is told to compile for one of those.

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

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="restricts an x86-64 processor to a lesser one")
LESSER = ["haswell", "nehalem"]
if get_host_cpu_features().get("avxvnni"):
    LESSER.append("alderlake")
#: Each multiplies int8 by another instruction.
OF_INTEGERS = [*LESSER, "skylake-avx512"] if get_host_cpu_features().get("avx512bw") else LESSER
#: What depends on the instructions most.
QUICK = ("test_int8_dots.py", "test_int8_product.py", "test_int8_rows.py")


def passes(name: str, folder: Path, *files: str, least: int) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not long", *files]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT,
        env=environment() | restricted_to(name) | {"NUMBA_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) >= least


@pytest.mark.parametrize("name", OF_INTEGERS)
def test_integer_products(name: str, tmp_path: Path) -> None:
    passes(name, tmp_path, *(f"tests/ops/{file}" for file in QUICK), least=100)


@pytest.mark.long
@pytest.mark.parametrize("name", ["haswell", "nehalem"])
def test_all_ops(name: str, tmp_path: Path) -> None:
    files = [path for path in sorted((ROOT / "tests" / "ops").glob("test_*.py")) if path.name not in LEFT_OUT]
    passes(name, tmp_path, *(str(path.relative_to(ROOT)) for path in files), least=700)


@pytest.mark.long
@pytest.mark.parametrize("name", ["haswell", "nehalem"])
def test_the_quantizer(name: str, tmp_path: Path) -> None:
    """Methods, calibration, a whole run, against naive versions."""
    passes(name, tmp_path, *(f"tests/quantize/{part}" for part in QUANTIZER), least=150)


@pytest.mark.long
def test_the_server(tmp_path: Path) -> None:
    """Its linear layers of bf16 too, which torch multiplies in a loop there."""
    pytest.importorskip("vllm")
    passes("haswell", tmp_path, "tests/serve/test_quantized.py", "tests/serve/test_chat.py", least=5)


QUANTIZER = ("methods", "calibration", "training", "test_pipeline.py", "run/test_expert.py", "run/test_not_finite.py")
#: They start processes for other processors, or Triton's interpreter, themselves.
LEFT_OUT = ("test_lesser_processors.py", "test_register_widths.py", "test_bad_operands.py")
