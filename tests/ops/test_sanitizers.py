"""The ops in C++ under the sanitizers and clang-tidy: no address outside, no undefined behaviour, no data race."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import ROOT, ran, said

pytestmark = [pytest.mark.long, pytest.mark.skipif(shutil.which("g++") is None, reason="g++ has the sanitizers")]
#: Runtimes to load before Python, and their settings. Python keeps memory to its end: no search for leaks.
RUNTIMES = {"address,undefined": ("libasan.so", "libubsan.so"), "thread": ("libtsan.so",)}
SETTINGS = {
    "ASAN_OPTIONS": "detect_leaks=0",
    "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    "TSAN_OPTIONS": "exitcode=66",
}


SOURCE = ROOT / "kernels" / "csrc"


def configure(name: str, *options: str) -> Path:
    """A build folder in the checkout: a later run compiles what has changed."""
    folder = ROOT / "work" / "sanitize" / name
    subprocess.run(["cmake", "-S", SOURCE, "-B", folder, "-G", "Ninja", *options], check=True)
    return folder


@pytest.mark.parametrize("sanitizer", RUNTIMES)
def test_nothing_is_found(sanitizer: str) -> None:
    """On every instruction set of this CPU; four threads for the thread sanitizer, tests/ops/support/sanitized.py."""
    folder = configure(sanitizer, f"-DSANITIZE={sanitizer}")
    subprocess.run(["cmake", "--build", folder], check=True)
    paths = [said("g++", f"-print-file-name={name}").strip() for name in RUNTIMES[sanitizer]]
    environment = os.environ | SETTINGS | {"LD_PRELOAD": " ".join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.ops.support.sanitized", folder / "libglm5_kernels.so"]
    done = ran(*command, env=environment, cwd=ROOT)
    print(done.stdout)
    assert done.returncode == 0, done.stderr[:6000]


def test_clang_tidy() -> None:
    """Its checks, and why some are left out, are in kernels/csrc/.clang-tidy."""
    folder = configure("clang-tidy", "-DCMAKE_DISABLE_FIND_PACKAGE_OpenMP=ON")  # clang's package has no omp.h
    program = Path(sys.executable).with_name("clang-tidy")
    done = ran(program, "-p", folder, "--quiet", *SOURCE.glob("*.cpp"))
    assert done.returncode == 0, done.stdout[:6000] + done.stderr[-1000:]
