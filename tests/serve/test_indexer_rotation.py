"""The rotation of vllm-ascend's indexer: replaced on both lines, refused where it is not found."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from glm5_ascend.deploy.diagnosis import preflight
from glm5_ascend.deploy.profiles.load import load
from glm5_ascend.errors import ConfigError
from glm5_ascend.serve import indexer_rotation
from glm5_ascend.serve.plugin.ascend import rotation

CALL = "def {}(x, cos, sin):\n    return torch_npu.npu_rotary_mul(x, cos, sin)\n"
#: Files and functions that call the operator, as the two lines have them.
LAYOUTS = {
    "0.23": {"attention.sfa_v1": ["pre", "post"], "attention.context_parallel.sfa_cp": ["post"]},
    "0.30": {"attention.indexer": ["forward_k", "forward"]},
}
Site = Callable[[dict[str, list[str]]], Path]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """Writes a package with these files; each also has a function without a rotation."""

    def write(layout: dict[str, list[str]]) -> Path:
        folder = tmp_path / "vllm_ascend"
        for module, functions in ({"attention.sfa_v1": []} | layout).items():
            path = folder.joinpath(*module.split(".")).with_suffix(".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(
                "def other(x):\n    return torch_npu.npu_rms_norm(x)\n" + "".join(map(CALL.format, functions))
            )
        return folder

    return write


@pytest.mark.parametrize("line", LAYOUTS)
def test_both_lines_are_known(line: str, site: Site) -> None:
    folder = site(LAYOUTS[line])
    assert indexer_rotation.rotating(folder) == LAYOUTS[line]
    assert indexer_rotation.is_known(folder)


@pytest.mark.parametrize("layout", [{}, {"attention.indexer": ["forward_k"]}, {"attention.sfa_v2": ["pre", "post"]}])
def test_another_layout_is_refused(layout: dict[str, list[str]], site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = site(layout)
    with pytest.raises(ConfigError, match="not known"):
        rotation.replace_all(folder)
    monkeypatch.setattr(preflight, "ascend_folder", lambda: folder)
    profile = load("a3-single-w4a8")
    facts, _ = preflight.facts_for(profile, profile.role(None), None, [])
    assert facts["our_plugin"] is False


@pytest.mark.parametrize("line", LAYOUTS)
def test_every_caller_uses_our_rotation(line: str, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = site(LAYOUTS[line])
    halves = types.SimpleNamespace(npu_rotary_mul=lambda x, cos, sin: x, npu_rms_norm=lambda x: -x)
    modules = {}
    for name in LAYOUTS[line]:
        modules[name] = module = types.ModuleType(f"vllm_ascend.{name}")
        module.__dict__["torch_npu"] = halves
        exec(folder.joinpath(*name.split(".")).with_suffix(".py").read_text(), module.__dict__)
        monkeypatch.setitem(sys.modules, f"vllm_ascend.{name}", module)
    assert rotation.replace_all(folder) == list(LAYOUTS[line])
    x, angle = torch.randn(3, 4), torch.tensor([0.3, 1.1, 0.3, 1.1])
    expected = rotation.rotate_neighbours(x, angle.cos(), angle.sin())
    assert not torch.equal(expected, x)
    for name, functions in LAYOUTS[line].items():
        for function in functions:
            assert torch.equal(modules[name].__dict__[function](x, angle.cos(), angle.sin()), expected)
        assert torch.equal(modules[name].__dict__["other"](x), -x)


def test_a_selection_without_our_rotation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Operator:
        @staticmethod
        def select(q: Any) -> Any:
            return q

    monkeypatch.setattr(rotation.RotatingNeighbours, "calls", 0)
    rotation.require_calls(Operator, "select")
    with pytest.raises(ConfigError, match="another function"):
        Operator.select(1)
    torch_npu = rotation.RotatingNeighbours(types.SimpleNamespace())
    for _ in range(2):
        torch_npu.npu_rotary_mul(torch.ones(1, 2), torch.ones(2), torch.zeros(2))
    assert Operator.select(1) == 1
