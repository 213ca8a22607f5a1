"""The peers' real packages from PyPI, each in a virtual environment of its own, made once per test session."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from glm5_ascend.deploy.rehearsal.environment import RehearsalEnvironment, prepare
from tests.contract.support import sglang as sglang_support
from tests.contract.support.loaded import Load, Loaded, read_loaded
from tests.contract.support.peers import interpreter_with, named_interpreter
from tests.contract.support.sglang import SGLang
from tests.support.command import made_model

#: Scripts that run in the environment with vllm-ascend.
SCRIPTS = Path(__file__).parent / "vllm_ascend_on_cpu"


@pytest.fixture(scope="session")
def msmodelslim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the real 26.1.0; MSMODELSLIM_PYTHON names one that has it already."""
    folder = tmp_path_factory.mktemp("msmodelslim") / "venv"
    return interpreter_with("MSMODELSLIM_PYTHON", folder, "msmodelslim==26.1.0", "transformers==5.4.0")


def rehearsal_environment(variable: str, line: str, folder: Path) -> RehearsalEnvironment:
    """The one whose interpreter the variable names, else a new one; with our scripts."""
    python = named_interpreter(variable)
    made = RehearsalEnvironment(python) if python else prepare(folder / "venv", line=line)
    return replace(made, packages={**made.packages, SCRIPTS.name: SCRIPTS})


@pytest.fixture(scope="session")
def vllm_ascend(tmp_path_factory: pytest.TempPathFactory) -> RehearsalEnvironment:
    """The real 0.23.0 without an NPU, 4 GB.

    VLLM_ASCEND_PYTHON names the interpreter of an environment made before, by `glm5-ascend rehearse --prepare`.
    """
    return rehearsal_environment("VLLM_ASCEND_PYTHON", "0.23", tmp_path_factory.mktemp("vllm_ascend"))


@pytest.fixture(scope="session")
def vllm_ascend_030(tmp_path_factory: pytest.TempPathFactory) -> RehearsalEnvironment:
    """The pre-release 0.30.0rc2 likewise, by VLLM_ASCEND_030_PYTHON and `rehearse --prepare --line 0.30`."""
    return rehearsal_environment("VLLM_ASCEND_030_PYTHON", "0.30", tmp_path_factory.mktemp("vllm_ascend_030"))


@pytest.fixture(scope="session", params=["vllm_ascend", "vllm_ascend_030"])
def line(request: pytest.FixtureRequest) -> RehearsalEnvironment:
    """Each supported line of vllm-ascend in turn."""
    environment: RehearsalEnvironment = request.getfixturevalue(request.param)
    return environment


@pytest.fixture(scope="module")
def load(line: RehearsalEnvironment, tmp_path_factory: pytest.TempPathFactory) -> Load:
    """`load(checkpoint)` -> its models as vllm-ascend's loader leaves them, read once per checkpoint."""
    done: dict[Path, dict[str, Loaded]] = {}

    def run(checkpoint: Path) -> dict[str, Loaded]:
        if checkpoint not in done:
            out = tmp_path_factory.mktemp("loaded") / "out"
            line.run("vllm_ascend_on_cpu.load", checkpoint, out)
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
    return made_model(tmp_path_factory.mktemp("model") / "glm5", "--preset", "tiny")
