"""GLM-5's rotation of neighbours, where vllm-ascend calls an operator that rotates halves."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch


class Mended:
    """torch_npu as one module sees it, with `npu_rotary_mul` rotating neighbours; all else is passed on.

    In vllm-ascend's sparse attention only the indexer calls that operator, and only without Triton-Ascend.
    """

    def __init__(self, torch_npu: Any) -> None:
        self._torch_npu = torch_npu

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch_npu, name)

    def npu_rotary_mul(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return rotate_neighbours(x, cos, sin)


def mend(module: ModuleType) -> None:
    if not isinstance(module.torch_npu, Mended):
        module.torch_npu = Mended(module.torch_npu)  # type: ignore[attr-defined]


def rotate_neighbours(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [..., R] with pairs (0, 1), (2, 3), ... rotated; cos, sin [..., R] hold each angle twice, as halves."""
    half = x.shape[-1] // 2
    cos, sin = cos[..., :half].float(), sin[..., :half].float()
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
    return turned.flatten(-2).to(x.dtype)
