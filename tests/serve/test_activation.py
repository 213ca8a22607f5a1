"""Whether our plugin is at work: vLLM's entry points and `doctor` ask one function."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from glm5_ascend.deploy.diagnosis.preflight import facts_for
from glm5_ascend.deploy.profiles.load import load
from glm5_ascend.serve import activation
from glm5_ascend.serve.activation import plugin_is_active
from glm5_ascend.serve.plugin import ascend, register, register_platform

ROOT = Path(__file__).parents[2]


@pytest.fixture
def atlas(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A machine with vllm-ascend, as far as `register` asks; the list grows with each call of our hook there."""
    hooked: list[str] = []
    find_spec = activation.importlib.util.find_spec
    monkeypatch.setattr(
        activation.importlib.util, "find_spec", lambda name: object() if name == "vllm_ascend" else find_spec(name)
    )
    monkeypatch.setattr(ascend, "register", lambda: hooked.append("ascend"))
    return hooked


@pytest.mark.parametrize("switch", ["0", "off", "1", None])
def test_the_cpu_switch_leaves_the_hook_beside_vllm_ascend_alone(
    switch: str | None, atlas: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hook mends wrong tokens beyond position 2048 (rule P28), and `doctor` relies on it."""
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.delenv("GLM5_CPU_PLATFORM", raising=False)
    if switch is not None:
        monkeypatch.setenv("GLM5_CPU_PLATFORM", switch)
    register()
    profile = load("a3-single-w4a8")
    facts, _ = facts_for(profile, profile.role(None), None, [])
    assert atlas == ["ascend"] and facts["our_plugin"] is True
    assert register_platform() is None


@pytest.mark.parametrize("plugins", [None, "ascend, glm5_ascend", "ascend"])
def test_doctor_says_what_the_plugin_does(
    plugins: str | None, atlas: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if plugins is not None:
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
    register()
    profile = load("a3-single-w4a8")
    assert facts_for(profile, profile.role(None), None, [])[0]["our_plugin"] is bool(atlas)


@pytest.mark.parametrize(
    ("environ", "beside", "on_cpu"),
    [
        ({}, True, True),
        ({"VLLM_PLUGINS": "ascend, glm5_ascend"}, True, True),
        ({"VLLM_PLUGINS": "ascend"}, False, False),
        ({"GLM5_CPU_PLATFORM": "off"}, True, False),
        ({"GLM5_CPU_PLATFORM": "1"}, True, True),
    ],
)
def test_whether_our_plugin_is_active(environ: dict[str, str], beside: bool, on_cpu: bool) -> None:
    assert plugin_is_active(environ, ascend=True) is beside
    assert plugin_is_active(environ, ascend=False) is on_cpu


def test_without_the_entry_point_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: ())
    assert not plugin_is_active({}, ascend=True)


def test_one_place_asks_for_vllm_ascend_and_for_the_switch() -> None:
    for words in ('find_spec("vllm_ascend")', '"GLM5_CPU_PLATFORM"'):
        files = [path.name for path in (ROOT / "glm5_ascend").rglob("*.py") if words in path.read_text("utf-8")]
        assert files == ["activation.py"]
