"""What a quantized linear's checks need of its integers: a few numbers per row, collected piece by piece."""

from __future__ import annotations

import zlib

import numpy as np
import torch

from glm5_ascend.checkpoint.schemes import W4A8_DYNAMIC, partial_sums, unpack_int4


def checksum(piece: torch.Tensor, value: int = 0) -> int:
    """Return the CRC-32 of a tensor's bytes, continued from `value`."""
    return zlib.crc32(piece.view(torch.uint8).numpy().data, value)


class IntegerRows:
    """Numbers about each row of the integers [N, K] of one linear, from pieces of its stored rows.

    Attributes:
        checksum: CRC-32 of the stored bytes.
        columns: K.
        most_lowest: how often a row holds -128, at most.
    """

    def __init__(self, module: str, scheme: str) -> None:
        self.packed = scheme == W4A8_DYNAMIC
        self.checksum = self.columns = self.most_lowest = 0
        self._chunks = partial_sums(module) if self.packed else 1
        self._high: list[torch.Tensor] = []
        self._low: list[torch.Tensor] = []
        self._sums: list[torch.Tensor] = []

    def add(self, stored: torch.Tensor) -> None:
        """Add stored rows, int8 [n, K]; a packed one is two rows."""
        self.checksum, self.columns = checksum(stored, self.checksum), stored.shape[1]
        integers = unpack_int4(stored) if self.packed else stored
        low = integers.amin(1)
        self._high.append(integers.amax(1))
        self._low.append(low)
        # numpy: torch's sum of int8 is 20 times slower.
        chunks = integers.numpy().reshape(len(integers), self._chunks, -1)
        self._sums.append(torch.from_numpy(chunks.sum(-1, dtype=np.int32)))
        if not self.packed and bool((rows := low == -128).any()):
            self.most_lowest = max(self.most_lowest, int((integers[rows] == -128).sum(1).max()))

    @property
    def high(self) -> torch.Tensor:
        """Largest integer of each row, int16 [N]."""
        return torch.cat(self._high).short()

    @property
    def low(self) -> torch.Tensor:
        """Smallest integer of each row, int16 [N]."""
        return torch.cat(self._low).short()

    @property
    def sums(self) -> torch.Tensor:
        """Sum of each row, or of each of the chunks that `scale_bias` has columns for, int64 [N, chunks]."""
        return torch.cat(self._sums).long()
