"""The peers' real packages from PyPI, each in a virtual environment of its own, made once per test session."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.support import sglang as sglang_support
from tests.contract.support.loaded import Load, Loaded, read_loaded
from tests.contract.support.peers import install, named_interpreter, new_environment
from tests.contract.support.sglang import SGLang
from tests.contract.support.vllm_ascend import VllmAscend, make_environment
from tests.support.command import ROOT


@pytest.fixture(scope="session")
def msmodelslim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PATH whose `msmodelslim` is the real 26.1.0 on a CPU (benchmarks/tools/msmodelslim_cpu.py).

    MSMODELSLIM_PYTHON names an interpreter that has it already.
    """
    folder = tmp_path_factory.mktemp("msmodelslim")
    python = named_interpreter("MSMODELSLIM_PYTHON")
    if python is None:
        python = new_environment(folder / "venv")
        install(python, "msmodelslim==26.1.0", "transformers==5.4.0")
    program = folder / "msmodelslim"
    program.write_text(f'#!/bin/sh\nexec {python} {ROOT}/benchmarks/tools/msmodelslim_cpu.py "$@"\n')
    program.chmod(0o755)
    return folder


@pytest.fixture(scope="session")
def vllm_ascend(tmp_path_factory: pytest.TempPathFactory) -> VllmAscend:
    """The real 0.23.0 without an NPU, 4 GB.

    VLLM_ASCEND_PYTHON names the interpreter of an environment made before, by `glm5-ascend rehearse --prepare`.
    """
    python = named_interpreter("VLLM_ASCEND_PYTHON")
    return VllmAscend(python) if python else make_environment(tmp_path_factory.mktemp("vllm_ascend") / "venv", "0.23")


@pytest.fixture(scope="session")
def vllm_ascend_030(tmp_path_factory: pytest.TempPathFactory) -> VllmAscend:
    """The pre-release 0.30.0rc2 likewise, by VLLM_ASCEND_030_PYTHON and `rehearse --prepare --line 0.30`."""
    python = named_interpreter("VLLM_ASCEND_030_PYTHON")
    return (
        VllmAscend(python) if python else make_environment(tmp_path_factory.mktemp("vllm_ascend_030") / "venv", "0.30")
    )


@pytest.fixture(scope="session", params=["vllm_ascend", "vllm_ascend_030"])
def line(request: pytest.FixtureRequest) -> VllmAscend:
    """Each supported line of vllm-ascend in turn."""
    environment: VllmAscend = request.getfixturevalue(request.param)
    return environment


@pytest.fixture(scope="module")
def load(line: VllmAscend, tmp_path_factory: pytest.TempPathFactory) -> Load:
    """`load(checkpoint)` -> its models as vllm-ascend's loader leaves them, read once per checkpoint."""
    done: dict[Path, dict[str, Loaded]] = {}

    def run(checkpoint: Path) -> dict[str, Loaded]:
        if checkpoint not in done:
            out = tmp_path_factory.mktemp("loaded") / "out"
            line.run("load", checkpoint, out)
            done[checkpoint] = read_loaded(out)
        return done[checkpoint]

    return run


@pytest.fixture(scope="session")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> SGLang:
    """The real 0.5.23 without an NPU, 2.5 GB.

    SGLANG_PYTHON names the interpreter of an environment made before, by
    `python -m tests.contract.support.sglang FOLDER`.
    """
    python = named_interpreter("SGLANG_PYTHON")
    return SGLang(python) if python else sglang_support.make_environment(tmp_path_factory.mktemp("sglang") / "venv")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smallest GLM-5 that msModelSlim takes, 12 MB."""
    out = tmp_path_factory.mktemp("model") / "glm5"
    subprocess.run([sys.executable, ROOT / "benchmarks/tools/make_model.py", out, "--preset", "tiny"], check=True)
    return out
