"""Writes shards whose layout is known in advance: tensors are written at their offsets, in any order.

The disk space is reserved before the first tensor, so a disk that is too small is an error in the first second. A
writer over the shards of a stopped run continues them: the layout is the same.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from glm5_ascend.checkpoint.index import INDEX_NAME
from glm5_ascend.checkpoint.shards import DTYPE_NAMES
from glm5_ascend.errors import OutputError
from glm5_ascend.files.written import checksum, disk_error, open_own, write_file

#: Headers, json files and file system overhead on top of the tensors.
DISK_MARGIN = 64 * 1024**2
_AGAIN = "re-run the same command to write it again"


@dataclass(frozen=True)
class TensorSpec:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


class ShardWriter:
    """Reserves and fills the shards of one checkpoint inside `directory`; may be used from several threads.

    A shard that a stopped run left is kept, whatever its bytes are: `checksum` tells. A link in its place is removed.

    Args:
        specs: all tensors, in the order they should lie on disk.
        shard_bytes: a shard is closed before it would exceed this many bytes of tensors.
        alone: tensor -> name of a file that contains only it; such files are not numbered.
    """

    def __init__(
        self, directory: Path, specs: Iterable[TensorSpec], shard_bytes: int, alone: Mapping[str, str] | None = None
    ) -> None:
        self.directory = directory
        self._place: dict[str, tuple[int, int, TensorSpec]] = {}  # name -> (shard, offset in file, spec)
        self._missing: set[str] = set()
        self._descriptors: list[int] = []
        self.weight_map: dict[str, str] = {}
        specs, alone = list(specs), alone or {}
        self.total_bytes = sum(spec.nbytes for spec in specs)
        groups = _group([spec for spec in specs if spec.name not in alone], shard_bytes)
        files = [
            (f"quant_model_weights-{index:05d}-of-{len(groups):05d}.safetensors", group)
            for index, group in enumerate(groups, start=1)
        ]
        files += [(alone[spec.name], [spec]) for spec in specs if spec.name in alone]
        try:
            for name, group in files:
                self._reserve(name, group)
        except OSError as error:
            self.close()
            raise disk_error(directory, error) from None

    def _reserve(self, file: str, group: list[TensorSpec]) -> None:
        header = shard_header(group)
        size = len(header) + sum(spec.nbytes for spec in group)
        descriptor = open_own(self.directory / file)
        self._descriptors.append(descriptor)
        os.posix_fallocate(descriptor, 0, size)  # keeps what a stopped run has written
        os.ftruncate(descriptor, size)
        write_at(descriptor, header, 0)
        start = len(header)
        for spec in group:
            self._place[spec.name] = (len(self._descriptors) - 1, start, spec)
            self._missing.add(spec.name)
            self.weight_map[spec.name] = file
            start += spec.nbytes

    def write_rows(self, name: str, start: int, rows: torch.Tensor) -> None:
        """Store some rows of a tensor; `expect_no_more` says when all are there."""
        shard, offset, spec = self._place[name]
        if rows.dtype is not spec.dtype or tuple(rows.shape[1:]) != tuple(spec.shape[1:]):
            raise ValueError(f"{name}: {rows.dtype} {list(rows.shape)}, planned {spec.dtype} {list(spec.shape)}")
        if start < 0 or start + len(rows) > spec.shape[0]:  # beyond its end lies the next tensor
            raise ValueError(f"{name}: rows {start} to {start + len(rows)}, planned {spec.shape[0]}")
        data = rows.cpu().contiguous().flatten().view(torch.uint8).numpy()
        row_bytes = spec.nbytes // spec.shape[0]
        try:
            write_at(self._descriptors[shard], data.data, offset + start * row_bytes)
        except OSError as error:
            raise disk_error(self.directory, error) from None

    def expect_no_more(self, *names: str) -> None:
        """Mark these tensors as complete, written now or by the stopped run."""
        self._missing.difference_update(names)

    def sync(self, names: Iterable[str]) -> None:
        """Flush these tensors to the disk: only then may a journal record them as done."""
        try:
            for shard in {self._place[name][0] for name in names}:
                os.fdatasync(self._descriptors[shard])
        except OSError as error:
            raise disk_error(self.directory, error) from None

    def checksum(self, names: Iterable[str]) -> str:
        """CRC-32 of the bytes of these tensors as they lie in the shards, in this order; eight hexadecimal digits."""
        value = 0
        try:
            for name in names:
                shard, offset, spec = self._place[name]
                value = checksum(self._descriptors[shard], offset, spec.nbytes, value)
        except OSError as error:
            raise disk_error(self.directory, error) from None
        return f"{value:08x}"

    @property
    def files(self) -> list[str]:
        """Names of the shards, in the order of their numbers, and of the index."""
        return [*dict.fromkeys(self.weight_map.values()), INDEX_NAME]

    def finish(self) -> None:
        """Check that nothing is missing or was replaced, flush to disk, write the index.

        Raises:
            OutputError: a shard was moved or replaced.
        """
        if self._missing:
            raise ValueError(f"{len(self._missing)} tensors were never written, e.g. {sorted(self._missing)[0]}")
        try:
            for descriptor, file in zip(self._descriptors, self.files, strict=False):
                os.fsync(descriptor)
                if not os.path.samestat((self.directory / file).lstat(), os.fstat(descriptor)):
                    raise OutputError(f"{self.directory / file}: replaced while it was written", _AGAIN)
        except OSError as error:
            raise disk_error(self.directory, error) from None
        self.close()
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": self.weight_map}
        write_json(self.directory / INDEX_NAME, index)

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())


def shard_header(specs: Iterable[TensorSpec]) -> bytes:
    """Return the length field and JSON header of a shard with these tensors in this order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for spec in specs:
        end = position + spec.nbytes
        header[spec.name] = {
            "dtype": DTYPE_NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [position, end],
        }  # fmt: skip
        position = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # data starts aligned, as the safetensors library writes it
    return len(encoded).to_bytes(8, "little") + encoded


def _group(specs: Iterable[TensorSpec], shard_bytes: int) -> list[list[TensorSpec]]:
    groups: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        if groups[-1] and size + spec.nbytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(spec)
        size += spec.nbytes
    return groups


def write_at(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data` at `offset`: a single pwrite may store less."""
    view, done = memoryview(data), 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], offset + done)


def write_json(path: Path, value: object) -> None:
    """Write `value` as indented JSON, atomically. Raises OutputError."""
    write_file(path, json.dumps(value, indent=2) + "\n")


def check_free_space(directory: Path, needed: int) -> None:
    """Refuse before work starts if the file system of `directory` cannot hold `needed` more bytes."""
    free = shutil.disk_usage(directory).free
    if needed + DISK_MARGIN > free:
        raise OutputError(
            f"{directory}: needs {(needed + DISK_MARGIN) / 1e9:.2f} GB, {free / 1e9:.2f} GB free on this disk",
            "free space or choose another output directory",
        )
