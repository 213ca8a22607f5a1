"""GLM-5's rotation of neighbours, in place of vllm-ascend's operator that rotates halves."""

from __future__ import annotations

import functools
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from glm5_ascend.errors import ConfigError
from glm5_ascend.serve import indexer_rotation

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


def replace_all(folder: Path) -> list[str]:
    """Replace the rotation in all modules of the vllm-ascend in `folder` that rotate its indexer; returns their names.

    Raises:
        ConfigError: the rotations are not where this package expects them.
    """
    modules = indexer_rotation.rotating(folder)
    if not indexer_rotation.is_known(folder):
        raise ConfigError(f"Triton-Ascend is missing, and how {folder} rotates GLM-5's indexer is not known", _FIX)
    for name in modules:
        replace(import_module(f"vllm_ascend.{name}"))
    return list(modules)


def replace(module: ModuleType) -> None:
    if not isinstance(module.torch_npu, RotatingNeighbours):
        module.torch_npu = RotatingNeighbours(module.torch_npu)  # type: ignore[attr-defined]


def require_calls(operator: Any, select: str) -> None:
    """Let `select` of vllm-ascend's DeviceOperator raise `ConfigError` if our rotation was not called before it."""
    original = getattr(operator, select)

    @functools.wraps(original)
    def checked(*arguments: Any, **named: Any) -> Any:
        if RotatingNeighbours.calls < indexer_rotation.MIN_CALLS:
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
