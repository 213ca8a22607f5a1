"""The input side of a run: parts of the source in fp32, fused and rotated, read a block of rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from glm5_ascend.checkpoint.read_ahead import ReadAhead
from glm5_ascend.checkpoint.source import Source
from glm5_ascend.checkpoint.workers import Workers, in_order
from glm5_ascend.model.rotation import Rotations
from glm5_ascend.model.spec import FIXED, Linear, Vector, Weight
from glm5_ascend.quantize.methods.transforms import Tensors, fuse_and_rotate_inputs
from glm5_ascend.quantize.run.blocks import blocks

#: Columns of a weight that are rotated together on its output side: whole panels of the Hadamard transform.
COLUMNS = 512


class FloatWeights:
    """The source's weights as the rotated model has them.

    Args:
        rotations: None for a recipe without quarot: then norms keep their gains, too.
        device: of the tensors returned.
    """

    def __init__(self, source: Source, rotations: Rotations | None, device: torch.device) -> None:
        self.source, self.rotations, self.device = source, rotations, device
        self._size = source.config.sizes

    def gains(self, prefix: str, parts: Iterable[Weight]) -> Tensors:
        """The norms' gains as stored, by module name."""
        gains = {}
        for weight in parts:
            if isinstance(weight, Vector) and weight.role == "norm":
                name = prefix + weight.tensor_name
                gains[weight.name] = self.source.read(name).to(self.device)
        return gains

    def load(self, prefix: str, weight: Weight, gains: Tensors) -> torch.Tensor:
        return self.load_all(prefix, [weight], gains)[weight.tensor_name]

    def load_all(self, prefix: str, parts: Iterable[Weight], gains: Tensors, workers: Workers | None = None) -> Tensors:
        """Several parts by tensor name, in pieces and in parallel if there are workers."""
        parts = list(parts)
        tensors = {weight.tensor_name: torch.empty(weight.shape(self._size), device=self.device) for weight in parts}

        def load_rows(piece: tuple[Weight, int, int]) -> None:
            weight, start, stop = piece
            rows, name = tensors[weight.tensor_name][start:stop], prefix + weight.tensor_name
            rows.copy_(self.source.read_rows(name, start, stop))
            if self.rotations is not None:
                fuse_and_rotate_inputs(rows, weight, gains, self.rotations)

        def rotate_columns(piece: tuple[Linear, int]) -> None:
            weight, start = piece
            assert self.rotations is not None
            columns = tensors[weight.tensor_name][:, start : start + COLUMNS]
            self.rotations.rotate_outputs(columns, weight.basis_out)

        pieces = [(weight, *block) for weight in parts for block in blocks(weight.shape(self._size))]
        list(in_order(workers, load_rows, pieces))
        if self.rotations is not None:
            linears = (weight for weight in parts if isinstance(weight, Linear) and weight.basis_out != FIXED)
            list(in_order(workers, rotate_columns, (
                (weight, start) for weight in linears for start in range(0, weight.shape(self._size)[1], COLUMNS)
            )))  # fmt: skip
        return tensors

    def experts_ahead(self, layer: int, reads: Callable[[int], bool] = lambda expert: True) -> Iterable[int]:
        """All routed experts of a layer; the system reads the next ones ahead, of those that `reads` tells."""
        config, prefix = self.source.config, self.source.config.spec.layer_prefix(layer)

        def names(expert: int) -> list[str]:
            linears = config.spec.expert_linears(expert) if reads(expert) else ()
            return [prefix + linear.tensor_name for linear in linears]

        return ReadAhead(self.source, range(config.n_routed_experts if config.is_moe(layer) else 0), names)

    def rows(self, prefix: str, weight: Weight, gains: Tensors, start: int, stop: int) -> torch.Tensor:
        """Rows of a linear whose output side is not rotated (embedding tables, heads)."""
        name = prefix + weight.tensor_name
        rows = self.source.read_rows(name, start, stop).to(self.device)
        return self._transform(rows, weight, gains)

    def lookup(self, prefix: str, weight: Weight, ids: torch.Tensor) -> torch.Tensor:
        """fp32 [len(ids), hidden] on the host: the rows `ids` of an embedding table; only they are read."""
        name, (unique, inverse) = prefix + weight.tensor_name, ids.unique(return_inverse=True)
        read = torch.cat([self.source.read_rows(name, row, row + 1) for row in unique.tolist()])
        return self._transform(read.to(self.device), weight, {}).cpu()[inverse]

    def _transform(self, rows: torch.Tensor, weight: Weight, gains: Tensors) -> torch.Tensor:
        if self.rotations is not None:
            fuse_and_rotate_inputs(rows, weight, gains, self.rotations)
        return rows
