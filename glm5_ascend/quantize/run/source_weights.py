"""The input side of a run: parts of the source in fp32, fused and rotated, read a block of rows at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from glm5_ascend.checkpoint.source import SourceCheckpoint
from glm5_ascend.checkpoint.workers import Workers
from glm5_ascend.errors import CheckpointError
from glm5_ascend.model.rotation import Rotations
from glm5_ascend.model.spec import Vector, Weight
from glm5_ascend.quantize.methods.transforms import Tensors, fuse_and_rotate
from glm5_ascend.quantize.run.blocks import blocks


class FloatWeights:
    """The source's weights as the rotated model has them.

    Args:
        rotations: None for a recipe without quarot: then norms keep their gains, too.
        device: of the tensors returned.
    """

    def __init__(self, source: SourceCheckpoint, rotations: Rotations | None, device: torch.device) -> None:
        self.source, self.rotations, self.device = source, rotations, device
        self._size = source.config.sizes

    def gains(self, prefix: str, parts: Iterable[Weight]) -> Tensors:
        """The norms' gains as stored, by module name."""
        gains = {}
        for part in parts:
            if isinstance(part, Vector) and part.role == "norm":
                name = prefix + part.tensor_name
                gains[part.name] = self._finite(name, self.source.read(name)).to(self.device)
        return gains

    def load(self, prefix: str, part: Weight, gains: Tensors) -> torch.Tensor:
        """One whole part, fp32."""
        name = part.tensor_name
        tensor = torch.empty(part.shape(self._size), device=self.device)
        for start, stop in blocks(tuple(tensor.shape)):
            tensor[start:stop] = self._finite(prefix + name, self.source.read_rows(prefix + name, start, stop))
        return self._transform(tensor, part, gains)

    def load_all(self, prefix: str, parts: Iterable[Weight], gains: Tensors, workers: Workers | None = None) -> Tensors:
        """Several parts by tensor name, read in parallel if there are workers."""
        # The largest first: the threads end at about the same time.
        parts = sorted(parts, key=lambda part: -torch.Size(part.shape(self._size)).numel())

        def load(part: Weight) -> torch.Tensor:
            return self.load(prefix, part, gains)

        loaded = workers.map(load, parts) if workers is not None else map(load, parts)
        return {part.tensor_name: tensor for part, tensor in zip(parts, loaded, strict=True)}

    def rows(self, prefix: str, part: Weight, gains: Tensors, start: int, stop: int) -> torch.Tensor:
        """Rows of a linear whose output side is not rotated (embedding tables, heads)."""
        name = prefix + part.tensor_name
        rows = self._finite(name, self.source.read_rows(name, start, stop)).to(self.device)
        return self._transform(rows, part, gains)

    def lookup(self, prefix: str, part: Weight, ids: torch.Tensor) -> torch.Tensor:
        """fp32 [len(ids), hidden] on the host: the rows `ids` of an embedding table; only they are read."""
        name, (unique, inverse) = prefix + part.tensor_name, ids.unique(return_inverse=True)
        read = torch.cat([self.source.read_rows(name, row, row + 1) for row in unique.tolist()])
        return self._transform(self._finite(name, read).to(self.device), part, {}).cpu()[inverse]

    def _finite(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor`; rounding would make plausible integers of a NaN or an infinity.

        Raises:
            CheckpointError: it holds one.
        """
        if not math.isfinite(float(tensor.sum())):  # one pass without a copy; finite values may add up to infinity
            count = int((~tensor.isfinite()).sum())
            if count:
                raise CheckpointError(
                    f"{self.source.directory}: {name}: {count} values are NaN or infinite", "download it again"
                )
        return tensor

    def _transform(self, tensor: torch.Tensor, part: Weight, gains: Tensors) -> torch.Tensor:
        if self.rotations is not None:
            fuse_and_rotate(tensor, part, gains, self.rotations)
        return tensor
