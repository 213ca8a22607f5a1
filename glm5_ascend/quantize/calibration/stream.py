"""Calibration activations on disk: memory does not grow with the number of tokens, and a resumed run finds them again.

Rows are mapped while they are used and no longer, because mapped pages count into the memory that is bounded.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from glm5_ascend.files.written import disk_error, open_own, sync

#: Residual streams are stored and summed as int64 in units of 2^-32: integer sums do not depend on their order.
FIXED_POINT = torch.int64
_UNIT = 2.0**32
_NUMPY: dict[torch.dtype, type[np.generic]] = {FIXED_POINT: np.int64, torch.float32: np.float32, torch.bool: np.bool_}


class Stream:
    """Values of every token of all calibration sequences at one depth, [tokens, columns], in a file of zeros at first.

    Args:
        lengths: tokens per sequence.
        dtype: FIXED_POINT, for values that are added up in any order; float32, or bool.
        keep: open an existing file instead of creating one.
    """

    def __init__(
        self, path: Path, lengths: tuple[int, ...], columns: int, dtype: torch.dtype = FIXED_POINT, keep: bool = False
    ) -> None:
        self.path, self.lengths, self.columns, self.dtype = path, lengths, columns, dtype
        self.tokens = sum(lengths)
        self.starts = [sum(lengths[:i]) for i in range(len(lengths))]
        self._lock = threading.Lock()
        try:
            descriptor = open_own(path, 0 if keep else os.O_TRUNC)
            try:
                size = self.tokens * columns * dtype.itemsize
                os.posix_fallocate(descriptor, 0, size)  # writing to a map of a full disk would end the process
                os.truncate(descriptor, size)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise disk_error(path, error) from None

    def _mapped(self, start: int = 0, length: int | None = None) -> NDArray[Any]:
        """Rows from `start` on; they are unmapped when the last reference is gone."""
        shape = (self.tokens if length is None else length, self.columns)
        offset = start * self.columns * self.dtype.itemsize
        return np.memmap(self.path, _NUMPY[self.dtype], "r+", offset, shape)

    def _encoded(self, values: torch.Tensor) -> NDArray[Any]:
        if self.dtype is FIXED_POINT:
            return values.cpu().double().mul_(_UNIT).round_().to(torch.int64).numpy()
        return values.cpu().numpy()

    def _decoded(self, copied: NDArray[Any]) -> torch.Tensor:
        values = torch.from_numpy(copied)
        return (values.double() / _UNIT).float() if self.dtype is FIXED_POINT else values

    def sequence(self, index: int) -> torch.Tensor:
        """[length, columns] of one sequence: fp32, or bool."""
        return self._decoded(np.array(self._mapped(self.starts[index], self.lengths[index])))

    def set_sequence(self, index: int, values: torch.Tensor) -> None:
        """Overwrite the first columns of a sequence by values [length, <= columns]."""
        self._mapped(self.starts[index], self.lengths[index])[:, : values.shape[1]] = self._encoded(values)

    def rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """The rows of `tokens`, int64 [T]."""
        return self._decoded(np.asarray(self._mapped())[tokens.numpy()])

    def add(self, tokens: torch.Tensor, values: torch.Tensor) -> None:
        """Add fp32 values to the rows `tokens`, each once; safe between threads, in any order of calls the same sum."""
        encoded = self._encoded(values)
        with self._lock:
            self._mapped()[tokens.numpy()] += encoded

    def sync(self) -> None:
        try:
            sync(self.path)
        except OSError as error:
            raise disk_error(self.path, error) from None

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
