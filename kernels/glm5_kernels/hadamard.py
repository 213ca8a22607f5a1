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
from functools import cache
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from glm5_kernels.contract import WRITTEN
from glm5_kernels.errors import KernelInputError

SYLVESTER = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float32)


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


def hadamard(operands: Hadamard) -> torch.Tensor:
    x, weight, dim = operands
    n = len(weight)
    left, right = factors(n)
    a, b = hadamard_matrix(left).to(x.device), hadamard_matrix(right).to(x.device) / math.sqrt(n)
    rows = x if dim == 1 else x.T
    y = (rows.reshape(-1, n) * weight).view(-1, left, right)
    rows.copy_((a.T @ (y @ b)).reshape(rows.shape))
    return x


@cache
def core_matrix(order: int) -> torch.Tensor:
    """The core, entries +-1, fp32 [order, order]."""
    construction = paley(order)
    if construction is None:
        return torch.ones(1, 1, dtype=torch.float32)
    p, exponent, doubled = construction
    character = _characters(p, exponent)
    bordered = torch.zeros(len(character) + 1, len(character) + 1)
    bordered[0, 1:], bordered[1:, 0] = 1.0, 1.0 if doubled else -1.0
    bordered[1:, 1:] = character
    identity = torch.eye(len(bordered))
    if not doubled:
        return (bordered + identity).float()
    minus = torch.tensor([[1.0, -1.0], [-1.0, -1.0]])
    return (torch.kron(bordered, SYLVESTER) + torch.kron(identity, minus)).float()


def _characters(p: int, exponent: int) -> torch.Tensor:
    """chi(a - b) for all a, b of the field of q = p^exponent, [q, q]: 1 for squares, -1 for others, 0 for 0."""
    squares = {i * i % p for i in range(1, p)}
    legendre = torch.tensor([0.0] + [1.0 if i in squares else -1.0 for i in range(1, p)])
    difference = (torch.arange(p)[:, None] - torch.arange(p)[None, :]) % p
    if exponent == 1:
        return legendre[difference]
    # Elements are x + y sqrt(n), with n no square: one is a square if its norm x^2 - n y^2 is one of the field of p.
    n = next(i for i in range(2, p) if i not in squares)
    x, y = difference[:, None, :, None], difference[None, :, None, :]
    return legendre[(x * x - n * y * y) % p].reshape(p * p, p * p)


def factors(n: int) -> tuple[int, int]:
    """`n` as two orders of similar size whose matrices' Kronecker product is H; the core is in the left one."""
    left = core_order(n)
    right = n // left
    while 2 * left <= right:
        left, right = 2 * left, right // 2
    return left, right


@cache
def hadamard_matrix(order: int) -> torch.Tensor:
    """The Hadamard matrix of this size, entries +-1, fp32."""
    matrix = core_matrix(core_order(order))
    while matrix.shape[0] < order:
        matrix = torch.kron(matrix, SYLVESTER)
    return matrix
