"""Multiplication by a Hadamard matrix, in place, in n log n steps.

    x[r, :] <- (x[r, :] * weight) H / sqrt(n)            dim = 1
    x[:, c] <- H^T (x[:, c] * weight) / sqrt(n)          dim = 0

H = C (x) S is the Kronecker product of a core C and Sylvester's matrix S of order 2^m: n = core * 2^m. The core is 1,
or for an n that is no power of two Paley's: of order q + 1 (q = 3 mod 4) or 2 (q + 1) (q = 1 mod 4), q being a prime or
the square of one. 6144 = 12 * 512, 576 = 36 * 16, 7168 = 28 * 256: every multiple of 4 up to 64 has one.

Source: QuaRot (arXiv 2404.00456); R. E. A. C. Paley, On orthogonal matrices (1933).
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
    odd = n // (n & -n)
    if odd == 1:
        return 1
    order = 4 * odd
    while n % order == 0:
        if paley(order) is not None:
            return order
        order *= 2
    raise KernelInputError(f"no Hadamard matrix of size {n}")


def paley(order: int) -> tuple[int, int, bool] | None:
    """(p, exponent, doubled) of Paley's matrix: q = p^exponent, `order` is q + 1 or, doubled, 2 (q + 1); or None."""
    if order % 4:
        return None
    for q, remainder, doubled in ((order - 1, 3, False), (order // 2 - 1, 1, True)):
        for p, exponent in ((q, 1), (math.isqrt(q), 2)):
            if q % 4 == remainder and p**exponent == q and _is_prime(p):
                return p, exponent, doubled
    return None


def _is_prime(p: int) -> bool:
    return p > 1 and all(p % divisor for divisor in range(2, math.isqrt(p) + 1))
