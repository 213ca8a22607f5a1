"""Tensors that are copies of others, found by their checksums and compared byte by byte."""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Iterator

import torch

from glm5_ascend.checkpoint.checks.loaded_checkpoint import LoadedCheckpoint

#: Smaller tensors can be equal by chance or by right (a few rows of zeros and ones).
_LEAST = 256  # elements


class Copies:
    """Weights by (shape, checksum); memory: some 100 bytes per weight, 6 MB for GLM-5."""

    def __init__(self) -> None:
        self._seen: dict[tuple[tuple[int, ...], int], list[str]] = defaultdict(list)

    def add(self, module: str, shape: tuple[int, ...], value: int) -> None:
        """Remember the weight of `module`, stored in this shape with this checksum."""
        if math.prod(shape) >= _LEAST:
            self._seen[tuple(shape), value].append(module)

    def found(self, checkpoint: LoadedCheckpoint) -> Iterator[tuple[str, str]]:
        """(module, copy of it) of all weights with equal bytes."""
        for modules in self._seen.values():
            for second in modules[1:]:
                if _equal(checkpoint, f"{modules[0]}.weight", f"{second}.weight"):
                    yield modules[0], second


def checksum(piece: torch.Tensor, value: int = 0) -> int:
    """CRC-32 of a tensor's bytes, continued from `value`."""
    return zlib.crc32(piece.contiguous().view(torch.uint8).numpy().data, value)


def _equal(checkpoint: LoadedCheckpoint, first: str, second: str) -> bool:
    pieces = zip(checkpoint.pieces(first), checkpoint.pieces(second), strict=True)
    return all(torch.equal(a, b) for a, b in pieces)
