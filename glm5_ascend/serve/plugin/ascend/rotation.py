"""GLM-5's rotation of neighbours, where vllm-ascend calls an operator that rotates halves."""

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


class Mended:
    """torch_npu as one module sees it, with `npu_rotary_mul` rotating neighbours; all else is passed on.

    In vllm-ascend's sparse attention only the indexer calls that operator, and only without Triton-Ascend.

    Attributes:
        calls: of all instances, how often the rotation was asked for.
    """

    calls = 0

    def __init__(self, torch_npu: Any) -> None:
        self._torch_npu = torch_npu

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch_npu, name)

    def npu_rotary_mul(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        Mended.calls += 1
        return rotate_neighbours(x, cos, sin)


def mend_all(folder: Path) -> list[str]:
    """Mend every module of the vllm-ascend in `folder` that rotates its indexer; returns their names.

    Raises:
        ConfigError: the rotations are not where this package knows them.
    """
    found = indexer_rotation.rotating(folder)
    if not indexer_rotation.known(folder):
        raise ConfigError(f"Triton-Ascend is missing, and how {folder} rotates GLM-5's indexer is not known", _FIX)
    for name in found:
        mend(import_module(f"vllm_ascend.{name}"))
    return list(found)


def mend(module: ModuleType) -> None:
    if not isinstance(module.torch_npu, Mended):
        module.torch_npu = Mended(module.torch_npu)  # type: ignore[attr-defined]


def require_calls(operator: Any, select: str) -> None:
    """Before the first choice of positions, `select` of vllm-ascend's DeviceOperator, ours must have been called.

    Both rotations come before it. Raises `ConfigError` there if another function did the work.
    """
    chosen = getattr(operator, select)

    @functools.wraps(chosen)
    def checked(*arguments: Any, **named: Any) -> Any:
        if Mended.calls < indexer_rotation.FEWEST:
            raise ConfigError("the indexer was rotated by another function than the one this package replaced", _FIX)
        return chosen(*arguments, **named)

    setattr(operator, select, staticmethod(checked))


def rotate_neighbours(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [..., R] with pairs (0, 1), (2, 3), ... rotated; cos, sin [..., R] hold each angle twice, as halves."""
    half = x.shape[-1] // 2
    cos, sin = cos[..., :half].float(), sin[..., :half].float()
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
    return turned.flatten(-2).to(x.dtype)
