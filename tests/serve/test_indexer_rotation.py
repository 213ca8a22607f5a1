"""The rotation of vllm-ascend's indexer is replaced, and a selection without it refused."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from glm5_ascend.errors import ConfigError
from glm5_ascend.serve.plugin.ascend import rotation


def test_the_callers_use_our_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    halves = types.SimpleNamespace(npu_rotary_mul=lambda x, cos, sin: x, npu_rms_norm=lambda x: -x)
    module = types.SimpleNamespace(torch_npu=halves)
    present = rotation.MODULES[1:]
    monkeypatch.setattr(rotation, "find_spec", lambda name: name in present)
    monkeypatch.setattr(rotation, "import_module", lambda name: module)
    assert rotation.replace_all() == list(present)
    x, angle = torch.randn(3, 4), torch.tensor([0.3, 1.1, 0.3, 1.1])
    cos, sin = angle.cos(), angle.sin()
    pairs = torch.view_as_complex(x.view(3, 2, 2)) * torch.complex(cos[:2], sin[:2])
    assert torch.allclose(module.torch_npu.npu_rotary_mul(x, cos, sin), torch.view_as_real(pairs).flatten(1))
    assert torch.equal(module.torch_npu.npu_rms_norm(x), -x)


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
