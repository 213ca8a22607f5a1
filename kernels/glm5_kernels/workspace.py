"""Buffers that calls share whose results are used up before the next one: those of a layer of the model by the next.

What repeats its work on operands that stay where they are needs room that stays where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch


class Workspace:
    """A buffer for each use, shape and dtype. One thread's: two that ran at once would write the same."""

    def __init__(self) -> None:
        self._tensors: dict[Any, torch.Tensor] = {}
        self._arrays: dict[Any, Any] = {}

    def tensor(self, use: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeros at first, then what was written last."""
        key = use, shape, dtype
        if key not in self._tensors:
            self._tensors[key] = torch.zeros(shape, dtype=dtype)
        return self._tensors[key]

    def array(self, use: str, shape: tuple[int, ...], dtype: Any, filled: int = 0) -> Any:
        """The same as an array that begins as `filled`."""
        key = use, shape, dtype
        if key not in self._arrays:
            self._arrays[key] = np.full(shape, filled, dtype)
        return self._arrays[key]


class Bound:
    """An op on operands that stay where they are, which were looked at when it was bound: each call computes anew.

    Attributes:
        outputs: tensors of a `Workspace`, good until the next call of anything that is bound to it.
    """

    def __init__(self, calls: Sequence[Callable[[], object]], outputs: tuple[torch.Tensor, ...], *operands: Any):
        self.outputs, self._calls, self._operands = outputs, tuple(calls), operands  # the calls hold addresses alone

    def __call__(self) -> None:
        for call in self._calls:
            call()
