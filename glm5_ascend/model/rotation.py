"""QuaRot's orthogonal matrices: random signs and Hadamard matrices, in the basis of each side of a weight.

Source: QuaRot (arXiv 2404.00456). Which matrix acts where is data: `Architecture.bases`. Any random signs serve: the
matrices travel with the checkpoint.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import torch

from glm5_ascend.errors import RecipeError
from glm5_ascend.model.config import ModelConfig
from glm5_ascend.model.spec import FIXED, HIDDEN, Basis
from glm5_kernels import ops

_CHUNK = 2**20  # weights rotated at a time: what fits the processor's cache


def has_hadamard(size: int) -> bool:
    """True if `ops.hadamard` knows a matrix of this size."""
    try:
        ops.hadamard(torch.zeros(1, size), torch.ones(size))
    except ops.KernelInputError:
        return False
    return True


class Rotations:
    """One orthogonal matrix R per basis of the model's spec; the same on every device.

    Raises:
        RecipeError: no Hadamard matrix of one of the sizes is known.
    """

    def __init__(self, config: ModelConfig, seed: int, device: torch.device | None = None) -> None:
        self.config, self.seed, self.device = config, seed, device
        self._sizes = config.sizes
        matrices = {basis.signs: basis.block_size(self._sizes) for basis in config.spec.bases.values()}
        for basis in config.spec.bases.values():
            block, size = basis.block_size(self._sizes), self._sizes[basis.signs]
            if basis.shifted and size % block:
                raise RecipeError(
                    f"{config.path}: quarot needs {basis.signs} to be a multiple of {block}, it is {size}",
                    "remove the quarot step from the recipe",
                )
        self._signs_of = {name: self._signs(name, size) for name, size in matrices.items()}

    def _signs(self, basis: str, size: int) -> torch.Tensor:
        # The seed of each basis derives from its name, so adding one never changes another. Mixed by a hash, because
        # torch's CPU generator looks at the low 32 bits only.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {basis}".encode()))
        if not has_hadamard(size):
            raise RecipeError(
                f"{self.config.path}: quarot: no Hadamard matrix of size {size} ({basis})",
                "remove the quarot step from the recipe",
            )
        return (torch.randint(0, 2, (size,), generator=generator) * 2.0 - 1.0).to(self.device)

    def rotate(self, x: torch.Tensor, basis: str) -> torch.Tensor:
        """x [..., n] -> x R, R being the matrix of `basis`; the identity for FIXED."""
        rows = x.reshape(-1, x.shape[-1]).clone(memory_format=torch.contiguous_format)
        self._rotate(rows, basis, 1)
        return rows.view(x.shape)

    def rotate_weight(self, weight: torch.Tensor, basis_in: str, basis_out: str) -> torch.Tensor:
        """W [out, in] -> R_out^T W R_in, the same map between rotated spaces; changes and returns `weight`."""
        self.rotate_inputs(weight, basis_in)
        self.rotate_outputs(weight, basis_out)
        return weight

    def rotate_inputs(self, rows: torch.Tensor, basis: str) -> None:
        """W <- W R for some rows of a weight, in place: rows do not depend on each other."""
        for chunk in rows.split(max(1, _CHUNK // rows.shape[1])):
            self._rotate(chunk, basis, 1)

    def rotate_outputs(self, columns: torch.Tensor, basis: str) -> None:
        """W <- R^T W for some columns of a weight, in place: columns do not depend on each other."""
        self._rotate(columns, basis, 0)

    def global_rotation(self) -> torch.Tensor:
        """Q, fp32 [hidden, hidden]: rotated hidden = hidden @ Q."""
        return self.rotate(torch.eye(self.config.hidden_size, device=self.device), HIDDEN)

    def mtp_rotation(self, final_norm: torch.Tensor) -> torch.Tensor:
        """`rot.weight` = Q^T diag(g) Q, fp32 [hidden, hidden]; g is the source's final norm gain."""
        identity = torch.eye(self.config.hidden_size, device=final_norm.device)  # torch.diag: torch_npu has no kernel
        return self.rotate_weight(identity * final_norm, HIDDEN, HIDDEN)

    def _rotate(self, x: torch.Tensor, basis: str, dim: int) -> None:
        if basis == FIXED:
            return
        space = self.config.spec.bases[basis]
        signs = self._signs_of[space.signs]
        for values in self._rotated_values(x, space, dim):
            ops.hadamard(values, signs, dim)
        if space.shifted:
            x.copy_(torch.roll(x, space.block_size(self._sizes) // 2, dims=dim))
            ops.hadamard(x, signs, dim)

    def _rotated_values(self, x: torch.Tensor, basis: Basis, dim: int) -> Iterator[torch.Tensor]:
        starts = basis.starts(self._sizes, x.shape[dim])
        if starts is None:
            yield x
        else:
            for start in starts:
                yield x.narrow(dim, start, basis.block_size(self._sizes))
