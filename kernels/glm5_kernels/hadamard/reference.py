"""Plain torch version of the Hadamard transform: two products with small matrices."""

from __future__ import annotations

import math
from functools import cache

import torch

from glm5_kernels.hadamard import Hadamard, core_order


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
    """The core of order 1 or p + 1, entries +-1, fp32."""
    if order == 1:
        return torch.ones(1, 1)
    p = order - 1
    squares = {i * i % p for i in range(1, p)}
    legendre = torch.tensor([0.0] + [1.0 if i in squares else -1.0 for i in range(1, p)])
    index = (torch.arange(p)[:, None] - torch.arange(p)[None, :]) % p
    skew = torch.zeros(order, order)
    skew[0, 1:], skew[1:, 0] = 1.0, -1.0
    skew[1:, 1:] = legendre[index]
    return skew + torch.eye(order)


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
