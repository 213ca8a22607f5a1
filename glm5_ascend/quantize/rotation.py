"""QuaRot's orthogonal matrices for GLM-5, applied as fast Walsh-Hadamard transforms.

Source: QuaRot (arXiv 2404.00456); which matrix acts where is data in `checkpoint/structure.py`; the block-shifted
matrix for the q latent follows msModelSlim 26.1.0. Any random signs serve: the matrices travel with the checkpoint.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable

import torch

from glm5_ascend.checkpoint import structure as S
from glm5_ascend.config import ModelConfig
from glm5_ascend.errors import RecipeError

Rotate = Callable[[torch.Tensor], torch.Tensor]  # x -> x R on the last dimension

_BLOCK = 2**20  # weights rotated at a time
_Q_LORA_BLOCK = 32  # Hadamard block on the q latent, shifted by half a block between two passes


def hadamard_core(order: int) -> torch.Tensor:
    """Hadamard matrix of order 1, 2, or p+1 with a prime p = 3 mod 4 (Paley's first construction), entries +-1."""
    if order <= 2:
        return torch.tensor([[1.0]]) if order == 1 else torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    p = order - 1
    squares = {i * i % p for i in range(1, p)}
    legendre = torch.tensor([0.0] + [1.0 if i in squares else -1.0 for i in range(1, p)])
    index = (torch.arange(p)[:, None] - torch.arange(p)[None, :]) % p
    skew = torch.zeros(order, order)
    skew[0, 1:], skew[1:, 0] = 1.0, -1.0
    skew[1:, 1:] = legendre[index]
    return skew + torch.eye(order)


def factors(size: int) -> tuple[int, int]:
    """`size` as two orders of Hadamard matrices of similar size whose Kronecker product it is.

    Raises:
        ValueError: no Hadamard matrix of this size is known to us (powers of two, or (p+1) * 2^m).
    """
    core = _core(size)
    if size % core or (core > 1 and any((core - 1) % d == 0 for d in range(2, math.isqrt(core - 1) + 1))):
        raise ValueError(f"no Hadamard matrix of size {size}")
    left, right = core, size // core
    while 2 * left <= right:
        left, right = 2 * left, right // 2
    return left, right


def _core(size: int) -> int:
    """Order of the factor of `size` that is no power of two, 1 if there is none."""
    odd = size
    while odd % 2 == 0:
        odd //= 2
    return 1 if odd == 1 else 4 * odd


def _matrix(order: int) -> torch.Tensor:
    """The matrix of one factor: its core, then Sylvester's doubling."""
    matrix = hadamard_core(_core(order))
    while matrix.shape[0] < order:
        matrix = torch.kron(matrix, hadamard_core(2))
    return matrix


class Hadamard:
    """x -> x diag(signs) H / sqrt(n) on the last dimension, H = A (x) B: two small products per row instead of n^2."""

    def __init__(self, size: int, generator: torch.Generator | None, device: torch.device | None = None) -> None:
        self.size = size
        left, right = factors(size)
        self._left, self._right = _matrix(left).T.contiguous().to(device), (_matrix(right) / math.sqrt(size)).to(device)
        ones = torch.ones(size)
        signs = ones if generator is None else torch.randint(0, 2, (size,), generator=generator) * 2.0 - 1.0
        self.signs = signs.to(device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = (x * self.signs).reshape(-1, len(self._left), len(self._right))
        return (self._left @ (y @ self._right)).reshape(x.shape)


class Rotations:
    """One orthogonal map per basis of the structure table; the same on every device."""

    def __init__(self, config: ModelConfig, seed: int, device: torch.device | None = None) -> None:
        self.config, self.seed, self.device = config, seed, device
        c = config
        self.hidden = self._hadamard(S.HIDDEN, c.hidden_size)
        self._kv_lora = self._hadamard(S.KV_LORA, c.kv_lora_rank)
        self._v = self._hadamard(S.HEADS_V, c.v_head_dim)
        if c.q_lora_rank % _Q_LORA_BLOCK:
            raise RecipeError(
                f"{c.path}: quarot needs q_lora_rank to be a multiple of {_Q_LORA_BLOCK}, it is {c.q_lora_rank}",
                "remove the quarot step from the recipe",
            )
        self._q_block = self._hadamard(S.Q_LORA, _Q_LORA_BLOCK)
        self._of: dict[str, Rotate] = {
            S.HIDDEN: self.hidden,
            S.HIDDEN_PAIR: lambda x: _halves(x, self.hidden),
            S.Q_LORA: self._rotate_q_lora,
            S.KV_LORA: self._kv_lora,
            S.KV_LORA_ROPE: lambda x: _leading(x, c.kv_lora_rank, self._kv_lora),
            S.HEADS_V: lambda x: _per_head(x, c.v_head_dim, self._v),
            S.HEADS_NOPE_V: lambda x: _per_head(
                x, c.qk_nope_head_dim + c.v_head_dim, lambda h: _trailing(h, c.v_head_dim, self._v)
            ),
        }

    def _hadamard(self, basis: str, size: int) -> Hadamard:
        # The seed of each basis derives from its name, so adding one never changes another. Mixed by a hash, because
        # torch's CPU generator looks at the low 32 bits only.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {basis}".encode()))
        try:
            return Hadamard(size, generator, self.device)
        except ValueError:
            raise RecipeError(
                f"{self.config.path}: quarot: no Hadamard matrix of size {size} ({basis})",
                "remove the quarot step from the recipe",
            ) from None

    def _rotate_q_lora(self, x: torch.Tensor) -> torch.Tensor:
        y = _per_head(x, _Q_LORA_BLOCK, self._q_block)
        return _per_head(torch.roll(y, _Q_LORA_BLOCK // 2, dims=-1), _Q_LORA_BLOCK, self._q_block)

    def rotate(self, x: torch.Tensor, basis: str) -> torch.Tensor:
        """x [..., n] -> x R, R being the matrix of `basis`; the identity for FIXED."""
        return x if basis == S.FIXED else self._of[basis](x)

    def rotate_weight(self, weight: torch.Tensor, basis_in: str, basis_out: str) -> torch.Tensor:
        """W [out, in] -> R_out^T W R_in, the same map between rotated spaces; changes and returns `weight`."""
        if basis_in != S.FIXED:
            for rows in weight.split(max(1, _BLOCK // weight.shape[1])):
                rows.copy_(self.rotate(rows, basis_in))
        if basis_out != S.FIXED:
            for columns in weight.split(max(1, _BLOCK // weight.shape[0]), dim=1):
                columns.copy_(self.rotate(columns.T.contiguous(), basis_out).T)
        return weight

    def global_rotation(self) -> torch.Tensor:
        """Q, fp32 [hidden, hidden]: rotated hidden = hidden @ Q."""
        return self.hidden(torch.eye(self.config.hidden_size, device=self.device))

    def mtp_rotation(self, final_norm: torch.Tensor) -> torch.Tensor:
        """`rot.weight` = Q^T diag(g) Q, fp32 [hidden, hidden]; g is the source's final norm gain."""
        return self.hidden((final_norm[:, None] * self.global_rotation()).T.contiguous()).T.contiguous()


def _halves(x: torch.Tensor, rotate: Rotate) -> torch.Tensor:
    left, right = x.chunk(2, dim=-1)
    return torch.cat([rotate(left), rotate(right)], dim=-1)


def _leading(x: torch.Tensor, size: int, rotate: Rotate) -> torch.Tensor:
    return torch.cat([rotate(x[..., :size]), x[..., size:]], dim=-1)


def _trailing(x: torch.Tensor, size: int, rotate: Rotate) -> torch.Tensor:
    return torch.cat([x[..., :-size], rotate(x[..., -size:])], dim=-1)


def _per_head(x: torch.Tensor, size: int, rotate: Rotate) -> torch.Tensor:
    return rotate(x.reshape(*x.shape[:-1], -1, size)).reshape(x.shape)
