"""The expected value of a weight: the source's weight after norm fusion, rotation and smoothing.

norm fusion and norm-linear smoothing  known from the stored norm gain: W' diag(g') = R_out^T W diag(g) R_in
rotation                               from the seed in the provenance; without it only Q of the residual stream
ov and up-down smoothing               the scale is the ratio, row by row, of the stored source weight to its reference
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from glm5_ascend.checkpoint.checks.loaded_checkpoint import LoadedCheckpoint
from glm5_ascend.checkpoint.checks.report import Report
from glm5_ascend.checkpoint.output import PROVENANCE_NAME
from glm5_ascend.checkpoint.source import Source
from glm5_ascend.checkpoint.types import ROT_NAME
from glm5_ascend.model.rotation import Rotations
from glm5_ascend.model.spec import FIXED, HIDDEN, HIDDEN_PAIR, Linear
from glm5_ascend.verify.checked import Checked

#: fp32 round-off between the stored Q and the one made again from the seed.
_SAME_ROTATION = 1e-4


#: Weights whose rows are compared at a time where rows are independent.
ROWS = 1 << 20


class ResidualRotation:
    """Only Q, the rotation of the residual stream, from `optional/quarot.safetensors` (msModelSlim's output).

    Args:
        rotation: fp32 [hidden, hidden]; None where nothing was rotated.
    """

    def __init__(self, rotation: torch.Tensor | None) -> None:
        self.rotation = rotation

    def rotate(self, x: torch.Tensor, basis: str) -> torch.Tensor:
        """x [..., size of `basis`] in that basis, the same shape."""
        if self.rotation is None or basis == FIXED:
            return x
        vectors = x.reshape(*x.shape[:-1], -1, len(self.rotation))  # a pair is two hidden vectors
        return (vectors @ self.rotation).reshape(x.shape)

    def rotate_weight(self, weight: torch.Tensor, basis_in: str, basis_out: str) -> torch.Tensor:
        """R_out^T W R_in of W [out, in]."""
        return self.rotate(self.rotate(weight, basis_in).T, basis_out).T


#: The known orthogonal maps of a checkpoint: all of them, made again from the recorded seed, or one.
Basis = Rotations | ResidualRotation
NO_ROTATION = ResidualRotation(None)


def find_basis(checked: Checked, report: Report) -> Basis | None:
    """Return the maps this checkpoint was made with; None if its rotation is unknown."""
    checkpoint, rotation = checked.checkpoint, checked.global_rotation
    description = checkpoint.description or {}
    if rotation is None and description.get("is_rot_used") is not True and ROT_NAME not in checkpoint.entries:
        return NO_ROTATION
    if (rotations := checked.rotations) is not None:
        if rotation is None or checked.seed_error <= _SAME_ROTATION:
            return rotations
        report.error(
            "against.rotation",
            f"global_rotation is not the one that seed {rotations.seed} of {PROVENANCE_NAME} gives",
            tensor="global_rotation",
            file="optional/quarot.safetensors",
            fix="files of different runs: quantize again",
        )
    return ResidualRotation(rotation) if rotation is not None else None


class ExpectedWeights:
    """Weights of `source` in the basis of `checkpoint`, before `ov` and `up-down` smoothing."""

    def __init__(self, source: Source, checkpoint: LoadedCheckpoint, basis: Basis) -> None:
        self.source, self.checkpoint, self.basis = source, checkpoint, basis

    def knows(self, linear: Linear) -> bool:
        """Return True if both sides of a linear can be rotated."""
        all_known = isinstance(self.basis, Rotations) or self.basis.rotation is None
        return all_known or {linear.basis_in, linear.basis_out} <= {FIXED, HIDDEN, HIDDEN_PAIR}

    def rows(self, prefix: str, linear: Linear, whole: bool) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield (first row, end row, W_ref of these rows): an even number of rows, or all if `whole`."""
        count, columns = linear.shape(self.checkpoint.config.sizes)
        step = count if whole else max(ROWS // columns // 2, 1) * 2
        read = step if linear.basis_out == FIXED else count  # else rotation mixes rows
        before, after = self._gains(prefix, linear)
        for start in range(0, count, read):
            weight = self.source.read_rows(prefix + linear.tensor_name, start, min(start + read, count)).mul_(before)
            weight = self.basis.rotate_weight(weight, linear.basis_in, linear.basis_out)
            for first in range(0, len(weight), step):
                rows = weight[first : first + step].mul_(after)
                yield start + first, start + first + len(rows), rows

    def _gains(self, prefix: str, linear: Linear) -> tuple[torch.Tensor, torch.Tensor]:
        if not linear.norm:
            return torch.ones(1), torch.ones(1)
        source = torch.cat([self.source.read(f"{prefix}{norm}.weight") for norm in linear.norm])
        stored = torch.cat([self.checkpoint.read(f"{prefix}{norm}.weight").float() for norm in linear.norm])
        if self.basis is NO_ROTATION:
            # Not fused: equal gains cancel exactly, also where a dead channel has 0.
            ratio = torch.where(stored != 0, source / stored, (source == 0).float())
            return torch.ones(1), ratio
        return source, torch.where(stored != 0, 1 / stored, torch.zeros_like(stored))


def moved_scale(reference: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """Return s per row with stored = reference / s by least squares; 1 for a row of zeros."""
    ratio = (stored * reference).sum(1) / reference.square().sum(1)
    return torch.where(ratio.isfinite() & (ratio != 0), 1 / ratio, torch.ones_like(ratio))


def silent_scale(reference: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """Return scales s [C] >= 0 with stored = reference * s by least squares; both fp32 [N, C].

    For columns that read a channel whose source row is all zero. That row does not show the scale that was moved out
    of it, and the search may choose any scale, often one so small that the column rounds to zero. The engine
    multiplies the column by zeros, so any multiple of the reference is right; values of another column are wrong.
    """
    ratio = (stored * reference).sum(0) / reference.square().sum(0)
    return torch.where(ratio.isfinite(), ratio, torch.ones_like(ratio)).clamp_min(0)
