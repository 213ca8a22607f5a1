"""Activity of our plugin, for vLLM's entry points and `doctor`."""

from __future__ import annotations

import importlib.metadata

import pytest

from glm5_ascend.deploy.diagnosis.preflight import facts_for
from glm5_ascend.deploy.profiles.load import load
from glm5_ascend.serve import activation
from glm5_ascend.serve.activation import plugin_is_active
from glm5_ascend.serve.plugin import ascend, register, register_platform


@pytest.fixture
def atlas(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A machine with vllm-ascend; the list records calls of our hook."""
    hooked: list[str] = []
    find_spec = activation.importlib.util.find_spec
    monkeypatch.setattr(
        activation.importlib.util, "find_spec", lambda name: object() if name == "vllm_ascend" else find_spec(name)
    )
    monkeypatch.setattr(ascend, "register", lambda: hooked.append("ascend"))
    return hooked


@pytest.mark.parametrize("switch", ["0", "off", "1", None])
def test_the_cpu_switch_does_not_disable_the_hook_for_vllm_ascend(
    switch: str | None, atlas: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hook corrects wrong tokens beyond position 2048 (rule P28), and `doctor` relies on it."""
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.delenv("GLM5_CPU_PLATFORM", raising=False)
    if switch is not None:
        monkeypatch.setenv("GLM5_CPU_PLATFORM", switch)
    register()
    profile = load("a3-single-w4a8")
    facts, _ = facts_for(profile, profile.role(None), None, [])
    assert atlas == ["ascend"] and facts["our_plugin"] is True
    assert register_platform() is None


@pytest.mark.parametrize(
    ("environ", "on_ascend", "on_cpu"),
    [
        ({}, True, True),
        ({"VLLM_PLUGINS": "ascend, glm5_ascend"}, True, True),
        ({"VLLM_PLUGINS": "ascend"}, False, False),
        ({"GLM5_CPU_PLATFORM": "off"}, True, False),
        ({"GLM5_CPU_PLATFORM": "1"}, True, True),
    ],
)
def test_whether_our_plugin_is_active(environ: dict[str, str], on_ascend: bool, on_cpu: bool) -> None:
    assert plugin_is_active(environ, ascend=True) is on_ascend
    assert plugin_is_active(environ, ascend=False) is on_cpu


def test_without_the_entry_point_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: ())
    assert not plugin_is_active({}, ascend=True)
