"""One safetensors file: its header checked against its bytes, tensors read with plain reads.

Reads instead of maps: mapped pages would count into the RSS we promise to bound. A header of a hostile or truncated
file is refused before anything is allocated. Format: https://huggingface.co/docs/safetensors (header length u64,
JSON header, data).
"""

from __future__ import annotations

import hashlib
import math
import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch

from glm5_ascend.errors import CheckpointError, shortened, shown
from glm5_ascend.files.untrusted import open_regular, parse_json

MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_DIMENSIONS = 8  # more, or larger numbers, and their product alone would take minutes
_AGAIN = "download or copy the file again"
#: Bytes of a WILLNEED that Linux reads for certain: it ignores what exceeds a device's read-ahead, by default 128 KiB.
_REQUEST = 2**17


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a dtype as users write it: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class TensorEntry:
    """Location of one tensor; `start` and `end` are absolute file offsets."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


class Shard:
    """A safetensors file whose header has been read once and checked.

    Attributes:
        size: bytes of the file. header_sha256: of the header alone: names, dtypes and shapes.
    Raises:
        CheckpointError: unreadable, truncated, overlapping or otherwise impossible header; names the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: dict[str, TensorEntry] = {}
        self.metadata: dict[str, str] = {}
        self.data_start = 0  # bytes of the header
        self.size, self.header_sha256 = 0, ""
        try:
            with open_regular(path, CheckpointError, _AGAIN) as file:
                self._parse(file.read(8), file, os.fstat(file.fileno()).st_size)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}", _AGAIN) from None

    def _parse(self, prefix: bytes, file: Any, size: int) -> None:
        if len(prefix) < 8:
            raise CheckpointError(f"{self.path}: truncated: {size} bytes, no safetensors header", _AGAIN)
        (length,) = struct.unpack("<Q", prefix)
        if length > MAX_HEADER_BYTES or 8 + length > size:
            raise CheckpointError(
                f"{self.path}: truncated or damaged: header says {length} bytes, file has {size}", _AGAIN
            )
        encoded = file.read(length)
        self.size, self.header_sha256 = size, hashlib.sha256(encoded).hexdigest()
        try:
            header = parse_json(encoded)
        except ValueError as error:
            reason = shortened(str(error), 160)
            raise CheckpointError(f"{self.path}: header is not valid JSON: {reason}", _AGAIN) from None
        if not isinstance(header, dict):
            raise CheckpointError(f"{self.path}: header is not a JSON object", _AGAIN)
        metadata = header.pop("__metadata__", {})
        self.metadata = metadata if isinstance(metadata, dict) else {}
        self.data_start = 8 + length
        for name, fields in header.items():
            self.entries[name] = self._entry(name, fields, 8 + length, size)
        self._check_layout(8 + length, size)

    def _entry(self, name: str, fields: Any, data_start: int, size: int) -> TensorEntry:
        if isinstance(fields, dict) and isinstance(dtype := fields.get("dtype"), str) and dtype not in DTYPES:
            raise CheckpointError(
                f"{self.path}: {shortened(name, 400)}: stored as {dtype[:40]}, which is not read",
                "take the original bf16, fp16 or FP8 checkpoint, or one in W4A8 or W8A8",
            )
        try:
            dtype, shape, (start, end) = DTYPES[fields["dtype"]], tuple(fields["shape"]), fields["data_offsets"]
            plain = len(shape) <= _MAX_DIMENSIONS
            plain = plain and all(type(value) is int and 0 <= value < 2**63 for value in (*shape, start, end))
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(
                f"{self.path}: {shortened(name, 400)}: impossible header entry {shown(fields, 120)}", _AGAIN
            ) from None
        if not plain or end - start != math.prod(shape) * dtype.itemsize:
            raise CheckpointError(
                f"{self.path}: {shortened(name, 400)}: header entry does not add up: {shown(fields, 120)}", _AGAIN
            )
        if data_start + end > size:
            raise CheckpointError(
                f"{self.path}: truncated: {shortened(name, 400)} ends at byte {data_start + end}, the file has {size}",
                _AGAIN,
            )
        return TensorEntry(name, dtype, shape, data_start + start, data_start + end)

    def _check_layout(self, data_start: int, size: int) -> None:
        position = data_start
        for entry in sorted(self.entries.values(), key=lambda e: (e.start, e.end)):
            if entry.start != position:
                raise CheckpointError(
                    f"{self.path}: {shortened(entry.name, 400)}: tensors overlap or leave a gap", _AGAIN
                )
            position = entry.end
        if position != size:
            raise CheckpointError(f"{self.path}: {size - position} bytes after the last tensor", _AGAIN)

    def read(self, name: str) -> torch.Tensor:
        """The tensor `name` as a fresh CPU tensor in its stored dtype."""
        entry = self.entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self.path}: no tensor {name}", "the index and the shard disagree: copy both again")
        return self.read_span(entry, 0, (entry.end - entry.start) // entry.dtype.itemsize).reshape(entry.shape)

    def read_span(self, entry: TensorEntry, start: int, stop: int) -> torch.Tensor:
        size = entry.dtype.itemsize
        buffer = torch.empty((stop - start) * size, dtype=torch.uint8)
        view, done = buffer.numpy().data, 0
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(entry.start + start * size)
                while done < len(view) and (count := file.readinto(view[done:])):
                    done += count
        except OSError as error:
            raise CheckpointError(f"{self.path}: {entry.name}: cannot be read: {error.strerror}", _AGAIN) from None
        if done < len(view):
            raise CheckpointError(f"{self.path}: {entry.name}: file shrank while it was read", _AGAIN)
        return buffer.view(entry.dtype)

    def read_ahead(self, entry: TensorEntry, start: int, stop: int) -> int:
        """Ask the system to read elements `start` to `stop` into its cache meanwhile; returns their bytes."""
        size = entry.dtype.itemsize
        _queue(os.getpid()).put((self.path, entry.start + start * size, (stop - start) * size))
        return (stop - start) * size


def requests(start: int, end: int) -> Iterator[tuple[int, int]]:
    """Cut bytes `start` to `end` of a file or of a mapping into (start, size) for posix_fadvise or madvise."""
    for first in range(start, end, _REQUEST):
        yield first, min(_REQUEST, end - first)


@cache
def _queue(_: int) -> SimpleQueue[tuple[Path, int, int]]:
    """The (file, offset, bytes) that a thread of this process asks for: whoever asks waits while the disk is busy."""
    queue: SimpleQueue[tuple[Path, int, int]] = SimpleQueue()

    def ask() -> None:
        while True:
            path, offset, size = queue.get()
            # What cannot be read is said by `read_span`. macOS has no posix_fadvise.
            with suppress(OSError, AttributeError), path.open("rb", buffering=0) as file:
                for request in requests(offset, offset + size):
                    os.posix_fadvise(file.fileno(), *request, os.POSIX_FADV_WILLNEED)

    Thread(target=ask, name="read-ahead", daemon=True).start()
    return queue
