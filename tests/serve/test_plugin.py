"""The two vLLM entry points: light, idempotent, and inactive on other platforms."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from glm5_ascend.serve.environment import ENTRY_POINTS, plugin_is_active
from glm5_ascend.serve.plugin import ascend, register, register_platform
from tests.support.command import said


def test_import_is_light() -> None:
    """vLLM imports the plugin in every process; packages of the API are light until a function is used."""
    code = (
        "import sys, glm5_ascend.serve.plugin, glm5_ascend.quantize, glm5_ascend.fidelity, glm5_ascend.verify; "
        "from glm5_ascend.deploy import doctor, render, serve; "
        "print({'torch', 'vllm', 'transformers'} & set(sys.modules))"
    )
    assert said(sys.executable, "-c", code).strip() == "set()"


def test_entry_points_are_declared() -> None:
    for group, name in ENTRY_POINTS.items():
        (entry,) = (e for e in importlib.metadata.entry_points(group=group) if e.name == name)
        assert callable(entry.load())


@pytest.fixture
def atlas(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A machine with vllm-ascend; the list records calls of our hook."""
    hooked: list[str] = []
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: object() if name == "vllm_ascend" else find_spec(name)
    )
    monkeypatch.setattr(ascend, "register", lambda: hooked.append("ascend"))
    return hooked


def test_with_vllm_ascend_only_the_hook_is_active(atlas: list[str]) -> None:
    register()
    assert atlas == ["ascend"]
    assert register_platform() is None  # two active platforms are a RuntimeError in vLLM


@pytest.mark.parametrize(
    ("environ", "active"),
    [({}, True), ({"VLLM_PLUGINS": "ascend, glm5_ascend"}, True), ({"VLLM_PLUGINS": "ascend"}, False)],
)
def test_whether_our_plugin_is_active(environ: dict[str, str], active: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert plugin_is_active(environ) is active
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: ())
    assert not plugin_is_active(environ)


@pytest.mark.server
def test_in_vllm(probe: Any, float_checkpoint: Path) -> None:
    """One of each is registered, and settings that would serve wrong numbers are refused."""
    seen = probe("plugin", str(float_checkpoint))
    assert seen["platform"] == seen["resolved"] == "glm5_ascend.serve.plugin.platform.Glm5CpuPlatform"
    assert seen["is_cpu"] is True
    modules = ("mla", "quantization", "models", "models")
    assert seen["registered"] == [f"glm5_ascend.serve.plugin.{name}" for name in modules]
    assert seen["executors"] == {"not_bound": "uni", "by_us": "uni", "bound": "mp", "asked": "mp"}
    allowed = len(os.sched_getaffinity(0))
    assert seen["threads"] == [[1, 1], [allowed, 2], [allowed, 2]]
    assert "divisible by tensor parallel size (3)" in seen["three_ranks"]  # vLLM's own check comes first
    assert "and expert parallel are not implemented for the CPU" in seen["expert_parallel"]
    assert "kv cache dtype 'fp8'" in seen["fp8_cache"]
    assert "quant_model_description.json does not exist" in seen["no_description"]
    assert "enable_sparse_li_c8 is 'yes'" in seen["no_boolean"]


@pytest.mark.server
def test_without_a_choice_no_scores_are_computed(probe: Any) -> None:
    """Two requests, a part of one and all of the other; caches in the model's dtype and in int8."""
    assert probe("positions") == [True] * 4
