"""Rotary embedding of a row, compiled; without slices, whose shape checks take numba long to compile."""

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
def rotate(x: Any, first: Any, angles: Any, token: Any) -> None:
    """Rotate the pairs (0, 1), (2, 3), ... of x from element `first` on by the token's angles, in place."""
    for pair in range(angles.cos.shape[1]):
        cos, sin, index = angles.cos[token, pair], angles.sin[token, pair], first + 2 * pair
        even, odd = x[index], x[index + 1]
        x[index], x[index + 1] = even * cos - odd * sin, odd * cos + even * sin


@inner
def rotate_halves(x: Any, angles: Any, token: Any) -> None:
    """Rotate the pairs (0, n), (1, n + 1), ... of x by the token's n angles, in place."""
    half = angles.cos.shape[1]
    for pair in range(half):
        cos, sin, a, b = angles.cos[token, pair], angles.sin[token, pair], x[pair], x[half + pair]
        x[pair], x[half + pair] = a * cos - b * sin, b * cos + a * sin
