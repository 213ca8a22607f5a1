"""Rotary embedding of a row, compiled."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from glm5_kernels.compiled.jit import inner


class Angles(NamedTuple):
    """cos, sin: fp32 [T, pairs]."""

    cos: Any
    sin: Any

    @classmethod
    def of(cls, cos: torch.Tensor, sin: torch.Tensor) -> Angles:
        return cls(cos.float().contiguous().numpy(), sin.float().contiguous().numpy())


@inner
def rotate(x: Any, cos: Any, sin: Any) -> None:
    """The pairs (0, 1), (2, 3), ... of x by their angles, in place."""
    for pair in range(len(cos)):
        even, odd = x[2 * pair], x[2 * pair + 1]
        x[2 * pair], x[2 * pair + 1] = even * cos[pair] - odd * sin[pair], odd * cos[pair] + even * sin[pair]


@inner
def rotate_halves(x: Any, cos: Any, sin: Any) -> None:
    """The pairs (0, n), (1, n + 1), ... of x by their n angles, in place."""
    half = len(cos)
    for pair in range(half):
        a, b = x[pair], x[half + pair]
        x[pair], x[half + pair] = a * cos[pair] - b * sin[pair], b * cos[pair] + a * sin[pair]
