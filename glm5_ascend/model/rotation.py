"""QuaRot's orthogonal matrices for GLM-5: random signs and Hadamard matrices, in the basis each weight side has.

Source: QuaRot (arXiv 2404.00456); which matrix acts where is data in `checkpoint/structure.py`; the block-shifted
matrix for the q latent follows msModelSlim 26.1.0. Any random signs serve: the matrices travel with the checkpoint.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import torch

from glm5_ascend.errors import RecipeError
from glm5_ascend.model import structure
from glm5_ascend.model.config import ModelConfig
from glm5_kernels import ops

_BLOCK = 2**20  # weights rotated at a time: what fits the processor's cache
_Q_LORA_BLOCK = 32  # Hadamard block on the q latent, shifted by half a block between two passes


class Rotations:
    """One orthogonal map R per basis of the structure table; the same on every device.

    Raises:
        RecipeError: no Hadamard matrix of one of the sizes is known.
    """

    def __init__(self, config: ModelConfig, seed: int, device: torch.device | None = None) -> None:
        self.config, self.seed, self.device = config, seed, device
        c = config
        if c.q_lora_rank % _Q_LORA_BLOCK:
            raise RecipeError(
                f"{c.path}: quarot needs q_lora_rank to be a multiple of {_Q_LORA_BLOCK}, it is {c.q_lora_rank}",
                "remove the quarot step from the recipe",
            )
        hidden = self._signs(structure.HIDDEN, c.hidden_size)
        latent, value = self._signs(structure.KV_LORA, c.kv_lora_rank), self._signs(structure.HEADS_V, c.v_head_dim)
        self._of: dict[str, torch.Tensor] = {
            structure.HIDDEN: hidden,
            structure.HIDDEN_PAIR: hidden,
            structure.Q_LORA: self._signs(structure.Q_LORA, _Q_LORA_BLOCK),
            structure.KV_LORA: latent,
            structure.KV_LORA_ROPE: latent,
            structure.HEADS_V: value,
            structure.HEADS_NOPE_V: value,
        }

    def _signs(self, basis: str, size: int) -> torch.Tensor:
        # The seed of each basis derives from its name, so adding one never changes another. Mixed by a hash, because
        # torch's CPU generator looks at the low 32 bits only.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {basis}".encode()))
        try:
            ops.hadamard(torch.zeros(1, size), torch.ones(size))
        except ops.KernelInputError:
            raise RecipeError(
                f"{self.config.path}: quarot: no Hadamard matrix of size {size} ({basis})",
                "remove the quarot step from the recipe",
            ) from None
        return (torch.randint(0, 2, (size,), generator=generator) * 2.0 - 1.0).to(self.device)

    def rotate(self, x: torch.Tensor, basis: str) -> torch.Tensor:
        """x [..., n] -> x R, R being the matrix of `basis`; the identity for FIXED."""
        rows = x.reshape(-1, x.shape[-1]).clone(memory_format=torch.contiguous_format)
        self._rotate(rows, basis, 1)
        return rows.view(x.shape)

    def rotate_weight(self, weight: torch.Tensor, basis_in: str, basis_out: str) -> torch.Tensor:
        """W [out, in] -> R_out^T W R_in, the same map between rotated spaces; changes and returns `weight`."""
        for rows in weight.split(max(1, _BLOCK // weight.shape[1])):
            self._rotate(rows, basis_in, 1)
        self._rotate(weight, basis_out, 0)
        return weight

    def global_rotation(self) -> torch.Tensor:
        """Q, fp32 [hidden, hidden]: rotated hidden = hidden @ Q."""
        return self.rotate(torch.eye(self.config.hidden_size, device=self.device), structure.HIDDEN)

    def mtp_rotation(self, final_norm: torch.Tensor) -> torch.Tensor:
        """`rot.weight` = Q^T diag(g) Q, fp32 [hidden, hidden]; g is the source's final norm gain."""
        identity = torch.eye(self.config.hidden_size, device=final_norm.device)  # torch.diag: torch_npu has no kernel
        return self.rotate_weight(identity * final_norm, structure.HIDDEN, structure.HIDDEN)

    def _rotate(self, x: torch.Tensor, basis: str, dim: int) -> None:
        """Rotate a matrix in place along `dim`."""
        if basis == structure.FIXED:
            return
        signs = self._of[basis]
        for part in self._rotated(x, basis, dim):
            ops.hadamard(part, signs, dim)
        if basis == structure.Q_LORA:
            x.copy_(torch.roll(x, _Q_LORA_BLOCK // 2, dims=dim))
            ops.hadamard(x, signs, dim)

    def _rotated(self, x: torch.Tensor, basis: str, dim: int) -> Iterator[torch.Tensor]:
        """The parts of `x` that the matrix of `basis` acts on."""
        c = self.config
        if basis == structure.KV_LORA_ROPE:
            yield x.narrow(dim, 0, c.kv_lora_rank)
        elif basis == structure.HEADS_NOPE_V:
            per_head = c.qk_nope_head_dim + c.v_head_dim
            for start in range(0, x.shape[dim], per_head):
                yield x.narrow(dim, start + c.qk_nope_head_dim, c.v_head_dim)
        else:
            yield x
