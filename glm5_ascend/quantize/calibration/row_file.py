"""Calibration activations on disk: memory does not grow with the number of tokens, and a resumed run finds them again.

Plain reads and writes, no maps: mapped pages would count into the memory that is bounded.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from glm5_ascend.checkpoint.writer import write_at
from glm5_ascend.files.written import disk_error, open_own

#: Rows further apart than this are read one by one, nearer ones together with what lies between.
_GAP = 8
_SPAN_BYTES = 32 * 1024**2
#: The residual stream is summed in units of 2^-32: integer sums do not depend on their order.
_UNIT = 2.0**32


class RowFile:
    """A matrix [rows, columns] in a file; a new file reads as zeros.

    Args:
        keep: open an existing file instead of creating one.
    """

    def __init__(self, path: Path, rows: int, columns: int, dtype: torch.dtype, keep: bool = False) -> None:
        self.path, self.rows, self.columns, self.dtype = path, rows, columns, dtype
        self._row_bytes = columns * dtype.itemsize
        self._lock = threading.Lock()
        try:
            self._descriptor = open_own(path, 0 if keep else os.O_TRUNC)
            os.truncate(self._descriptor, rows * self._row_bytes)
        except OSError as error:
            raise disk_error(path, error) from None

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Rows `start` to `stop`."""
        buffer = torch.empty((stop - start) * self._row_bytes, dtype=torch.uint8)
        view, done = buffer.numpy().data, 0
        while done < len(view):
            count = os.preadv(self._descriptor, [view[done:]], start * self._row_bytes + done)
            if count == 0:
                raise ValueError(f"{self.path}: rows {start} to {stop} are not there")
            done += count
        return buffer.view(self.dtype).reshape(stop - start, self.columns)

    def write(self, start: int, values: torch.Tensor) -> None:
        """Overwrite rows from `start` on."""
        data = values.to("cpu", self.dtype).contiguous().flatten().view(torch.uint8).numpy().data
        try:
            write_at(self._descriptor, data, start * self._row_bytes)
        except OSError as error:
            raise disk_error(self.path, error) from None

    def gather(self, index: torch.Tensor) -> torch.Tensor:
        """The rows `index` (int64, ascending)."""
        out = torch.empty(len(index), self.columns, dtype=self.dtype)
        for first, last in self._runs(index):
            low, high = int(index[first]), int(index[last - 1]) + 1
            out[first:last] = self.read(low, high)[index[first:last] - low]
        return out

    def add(self, index: torch.Tensor, values: torch.Tensor) -> None:
        """Add to the rows `index` (int64, ascending, each once); safe between threads."""
        with self._lock:
            for first, last in self._runs(index):
                low, high = int(index[first]), int(index[last - 1]) + 1
                rows = self.read(low, high)
                rows[index[first:last] - low] += values[first:last]
                self.write(low, rows)

    def _runs(self, index: torch.Tensor) -> Iterator[tuple[int, int]]:
        """Pieces of `index` whose rows lie close together and fill no more than `_SPAN_BYTES`."""
        if not len(index):
            return
        span = max(1, _SPAN_BYTES // self._row_bytes)
        cuts = [*(np.flatnonzero(np.diff(index.numpy()) > _GAP) + 1).tolist(), len(index)]
        first = 0
        for cut in cuts:
            while first < cut:
                last = int(torch.searchsorted(index[first:cut], int(index[first]) + span)) + first
                yield first, last
                first = last

    def sync(self) -> None:
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            raise disk_error(self.path, error) from None

    def close(self) -> None:
        """Close; a second time does nothing, even if a signal ended the first."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def remove(self) -> None:
        """Close and delete."""
        self.close()
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> RowFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def to_units(values: torch.Tensor) -> torch.Tensor:
    """fp32 on any device -> int64 in units of 2^-32, on the host."""
    return (values.cpu().double() * _UNIT).round_().to(torch.int64)


def from_units(units: torch.Tensor) -> torch.Tensor:
    """int64 in units of 2^-32 -> fp32."""
    return (units.double() / _UNIT).float()


class Stream:
    """The residual stream of all calibration sequences at one depth, [tokens, hidden].

    Args:
        lengths: tokens per sequence.
        keep: open an existing file.
    """

    def __init__(self, path: Path, lengths: tuple[int, ...], hidden: int, keep: bool = False) -> None:
        self.lengths = lengths
        self.tokens = sum(lengths)
        self.starts = [sum(lengths[:i]) for i in range(len(lengths))]
        self.file = RowFile(path, self.tokens, hidden, torch.int64, keep)

    def sequence(self, number: int) -> torch.Tensor:
        """fp32 [length, hidden] of one sequence."""
        start = self.starts[number]
        return from_units(self.file.read(start, start + self.lengths[number]))

    def set_sequence(self, number: int, values: torch.Tensor) -> None:
        self.file.write(self.starts[number], to_units(values))

    def add(self, tokens: torch.Tensor, values: torch.Tensor) -> None:
        """Add fp32 `values` to the rows `tokens`, in any order of calls the same sum."""
        self.file.add(tokens, to_units(values))
