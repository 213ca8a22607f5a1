"""Outliers of activations and weights in three states: as in the source, rotated, rotated and smoothed."""

from __future__ import annotations

import torch

from glm5_ascend.fidelity.analysis.measure import Outliers
from glm5_ascend.model.rotation import Rotations
from glm5_ascend.model.spec import FIXED, Linear
from glm5_ascend.quantize.methods.transforms import Tensors

STATES = ("source", "rotated", "smoothed")


class Unrotated:
    """Inputs of linears brought back to the source's basis: x R -> x, times the gain that was folded away."""

    def __init__(self, rotations: Rotations | None) -> None:
        self.rotations = rotations
        self._matrices: dict[tuple[str, int], torch.Tensor] = {}

    def __call__(self, x: torch.Tensor, part: Linear, gains: Tensors) -> torch.Tensor:
        """x [T, K] as `part` of the rotated model reads it -> [T, K] as the source's reads it."""
        if self.rotations is None:
            return x
        back = x
        if part.basis_in != FIXED:
            config = self.rotations.config
            basis = config.spec.bases[part.basis_in]
            size = x.shape[1] if basis.shifted or basis.period else basis.block_size(config.sizes)
            back = (x.reshape(-1, size) @ self._matrix(part.basis_in, size).T).view(x.shape)
        return back * torch.cat([gains[norm] for norm in part.norm]) if part.norm else back

    def _matrix(self, basis: str, size: int) -> torch.Tensor:
        assert self.rotations is not None
        if (basis, size) not in self._matrices:
            self._matrices[basis, size] = self.rotations.rotate(torch.eye(size), basis)
        return self._matrices[basis, size]


def states(source: torch.Tensor, rotated: torch.Tensor, smoothed: torch.Tensor) -> dict[str, Outliers]:
    """The three states of one tensor."""
    return {name: Outliers.of(x) for name, x in zip(STATES, (source, rotated, smoothed), strict=True)}
