"""Outliers of activations and weights in three states: as in the source, rotated, rotated and smoothed."""

from __future__ import annotations

import torch

from glm5_ascend.fidelity.analysis.measure import Outliers
from glm5_ascend.model.rotation import Rotations
from glm5_ascend.model.spec import FIXED, Linear
from glm5_ascend.quantize.methods.transforms import Tensors

STATES = ("source", "rotated", "smoothed")


class SourceBasis:
    """Transforms inputs of rotated linears back to the source's basis: x R -> x, times the gain that was fused."""

    def __init__(self, rotations: Rotations | None) -> None:
        self.rotations = rotations
        self._matrices: dict[tuple[str, int], torch.Tensor] = {}

    def __call__(self, x: torch.Tensor, linear: Linear, gains: Tensors) -> torch.Tensor:
        """Input x [T, K] of `linear` in the rotated model -> its input [T, K] in the source."""
        if self.rotations is None:
            return x
        back = x
        if linear.basis_in != FIXED:
            config = self.rotations.config
            basis = config.spec.bases[linear.basis_in]
            size = x.shape[1] if basis.shifted or basis.period else basis.block_size(config.sizes)
            back = (x.reshape(-1, size) @ self._matrix(linear.basis_in, size).T).view(x.shape)
        return back * torch.cat([gains[norm] for norm in linear.norm]) if linear.norm else back

    def _matrix(self, basis: str, size: int) -> torch.Tensor:
        assert self.rotations is not None
        if (basis, size) not in self._matrices:
            self._matrices[basis, size] = self.rotations.rotate(torch.eye(size), basis)
        return self._matrices[basis, size]


def outliers_by_state(source: torch.Tensor, rotated: torch.Tensor, smoothed: torch.Tensor) -> dict[str, Outliers]:
    """Outliers of one tensor in its three states."""
    return {name: Outliers.of(x) for name, x in zip(STATES, (source, rotated, smoothed), strict=True)}
