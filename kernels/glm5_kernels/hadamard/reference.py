"""Plain torch version of the Hadamard transform: two products with small matrices."""

from __future__ import annotations

import math
from functools import cache

import torch

from glm5_kernels.hadamard import Hadamard, core_order, paley


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
        return torch.ones(1, 1)
    p, exponent, doubled = construction
    character = _characters(p, exponent)
    bordered = torch.zeros(len(character) + 1, len(character) + 1)
    bordered[0, 1:], bordered[1:, 0] = 1.0, 1.0 if doubled else -1.0
    bordered[1:, 1:] = character
    identity = torch.eye(len(bordered))
    if not doubled:
        return bordered + identity
    plus, minus = torch.tensor([[1.0, 1.0], [1.0, -1.0]]), torch.tensor([[1.0, -1.0], [-1.0, -1.0]])
    return torch.kron(bordered, plus) + torch.kron(identity, minus)


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
        matrix = torch.kron(matrix, torch.tensor([[1.0, 1.0], [1.0, -1.0]]))
    return matrix
