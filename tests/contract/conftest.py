"""The peers' real packages from PyPI, each in a virtual environment of its own, made once per test session."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TORCH = "torch==2.13.0"


def install(python: Path, *packages: str) -> None:
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
    subprocess.run([str(part) for part in command], check=True)


@pytest.fixture(scope="session")
def msmodelslim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PATH whose `msmodelslim` is the real 26.1.0 on a CPU (benchmarks/msmodelslim_cpu.py).

    MSMODELSLIM_PYTHON names an interpreter that has it already.
    """
    folder = tmp_path_factory.mktemp("msmodelslim")
    python = Path(os.environ.get("MSMODELSLIM_PYTHON", ""))
    if not python.is_file():
        venv.create(folder / "venv", with_pip=True)
        python = folder / "venv/bin/python"
        install(python, TORCH)  # first, or pip takes a CUDA build
        install(python, "msmodelslim==26.1.0", "transformers==5.4.0")
    program = folder / "msmodelslim"
    program.write_text(f'#!/bin/sh\nexec {python} {ROOT}/benchmarks/msmodelslim_cpu.py "$@"\n')
    program.chmod(0o755)
    return folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smallest GLM-5 that msModelSlim takes, 12 MB."""
    out = tmp_path_factory.mktemp("model") / "glm5"
    subprocess.run([sys.executable, ROOT / "benchmarks/make_model.py", out, "--preset", "tiny"], check=True)
    return out
