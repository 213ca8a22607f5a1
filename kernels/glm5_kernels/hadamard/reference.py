"""Plain torch version of the Hadamard transform: two products with small matrices."""

from __future__ import annotations

import math
from functools import cache

import torch

from glm5_kernels.errors import KernelInputError, require_fp32


def hadamard(x: torch.Tensor, weight: torch.Tensor, dim: int = 1) -> torch.Tensor:
    """See the package docstring."""
    n = checked_size(x, weight, dim)
    left, right = factors(n)
    a, b = _matrix(left).to(x.device), _matrix(right).to(x.device) / math.sqrt(n)
    rows = x if dim == 1 else x.T
    y = (rows.reshape(-1, n) * weight).view(-1, left, right)
    rows.copy_((a.T @ (y @ b)).reshape(rows.shape))
    return x


def checked_size(x: torch.Tensor, weight: torch.Tensor, dim: int) -> int:
    """n; raises `KernelInputError` if the arguments do not fit."""
    require_fp32("weight", weight, (None,))
    n = weight.numel()
    if x.dim() != 2 or dim not in (0, 1) or n < 1 or x.shape[dim] % n or x.dtype != torch.float32:
        raise KernelInputError(f"hadamard of size {n} along dimension {dim} of {x.dtype} {list(x.shape)}")
    core(n)
    return n


def core(n: int) -> int:
    """Order of the core of the Hadamard matrix of size `n`: 1, or a multiple of 4 that is no power of two."""
    odd = n
    while odd % 2 == 0:
        odd //= 2
    order = 1 if odd == 1 else 4 * odd
    p = order - 1
    if n % order or (order > 1 and any(p % d == 0 for d in range(2, math.isqrt(p) + 1))):
        raise KernelInputError(f"no Hadamard matrix of size {n}")
    return order


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
    left = core(n)
    right = n // left
    while 2 * left <= right:
        left, right = 2 * left, right // 2
    return left, right


@cache
def _matrix(order: int) -> torch.Tensor:
    matrix = core_matrix(core(order))
    while matrix.shape[0] < order:
        matrix = torch.kron(matrix, torch.tensor([[1.0, 1.0], [1.0, -1.0]]))
    return matrix
