"""Multiplication by a Hadamard matrix, in place, in n log n steps.

    x[r, :] <- (x[r, :] * weight) H / sqrt(n)            dim = 1
    x[:, c] <- H^T (x[:, c] * weight) / sqrt(n)          dim = 0

H = C (x) S is the Kronecker product of a core C and Sylvester's matrix S of order 2^m: n = core * 2^m, and the core is
1 or, for an n that is no power of two, Paley's of order p + 1 with a prime p = 3 mod 4 (12 for 6144 = 12 * 512).

Source: QuaRot (arXiv 2404.00456); R. E. A. C. Paley, On orthogonal matrices (1933), first construction.
"""

from __future__ import annotations

import math
from typing import Annotated, NamedTuple

from torch import Tensor

from glm5_kernels.contract import WRITTEN
from glm5_kernels.errors import KernelInputError


class Hadamard(NamedTuple):
    """x times `weight` times the Hadamard matrix of size n along `dim`, in place; returns x."""

    x: Annotated[Tensor, "fp32 [rows, columns]", WRITTEN]  # the last dimension is contiguous
    weight: Annotated[Tensor, "fp32 [n]"]  # factors, e.g. random signs; each run of n elements is transformed by itself
    dim: int = 1

    def rules(self) -> None:
        n = len(self.weight)
        if self.dim not in (0, 1) or n < 1 or self.x.shape[self.dim] % n:
            raise KernelInputError(f"hadamard of size {n} along dimension {self.dim} of {list(self.x.shape)}")
        core_order(n)


def core_order(n: int) -> int:
    """Order of the core of the Hadamard matrix of size `n`: 1, or a multiple of 4 that is no power of two."""
    odd = n
    while odd % 2 == 0:
        odd //= 2
    order = 1 if odd == 1 else 4 * odd
    p = order - 1
    if n % order or (order > 1 and any(p % d == 0 for d in range(2, math.isqrt(p) + 1))):
        raise KernelInputError(f"no Hadamard matrix of size {n}")
    return order
