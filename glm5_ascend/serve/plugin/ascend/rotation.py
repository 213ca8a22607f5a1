"""GLM-5's rotation of neighbours, in place of vllm-ascend's operator that rotates halves."""

from __future__ import annotations

import functools
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from glm5_ascend.errors import ConfigError

#: Modules of vllm-ascend's sparse attention: 0.23 has the first two, 0.30 also the third.
MODULES = (
    "vllm_ascend.attention.sfa_v1", "vllm_ascend.attention.context_parallel.sfa_cp", "vllm_ascend.attention.indexer",
)  # fmt: skip
#: Rotations before a selection: of queries, and of keys.
MIN_CALLS = 2
_FIX = "install triton-ascend (the image has it), or a vllm-ascend that this package was tested with"


class RotatingNeighbours:
    """Replaces torch_npu in a module: `npu_rotary_mul` rotates neighbours, everything else is torch_npu's.

    In vllm-ascend's sparse attention only the indexer calls that operator, and only without Triton-Ascend.

    Attributes:
        calls: number of rotations by all instances.
    """

    calls = 0

    def __init__(self, torch_npu: Any) -> None:
        self._torch_npu = torch_npu

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch_npu, name)

    def npu_rotary_mul(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        RotatingNeighbours.calls += 1
        return rotate_neighbours(x, cos, sin)


def replace_all() -> list[str]:
    """Replace the rotation in vllm-ascend's modules of sparse attention; returns their names."""
    modules: dict[str, Any] = {name: import_module(name) for name in MODULES if find_spec(name)}
    rotating = {name: module for name, module in modules.items() if hasattr(module, "torch_npu")}
    for module in rotating.values():
        module.torch_npu = RotatingNeighbours(module.torch_npu)
    return list(rotating)


def require_calls(operator: Any, select: str) -> None:
    """Let `select` of vllm-ascend's DeviceOperator raise `ConfigError` if our rotation was not called before it."""
    original = getattr(operator, select)

    @functools.wraps(original)
    def checked(*arguments: Any, **named: Any) -> Any:
        if RotatingNeighbours.calls < MIN_CALLS:
            raise ConfigError("the indexer was rotated by another function than the one this package replaced", _FIX)
        return original(*arguments, **named)

    setattr(operator, select, staticmethod(checked))


def rotate_neighbours(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [..., R] with pairs (0, 1), (2, 3), ... rotated; cos, sin [..., R] hold each angle twice, as halves."""
    half = x.shape[-1] // 2
    cos, sin = cos[..., :half].float(), sin[..., :half].float()
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    rotated = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
    return rotated.flatten(-2).to(x.dtype)
