"""A checkpoint directory as the loader sees it: tensors by name, read in pieces of bounded size."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from glm5_ascend.checkpoint.checks.report import Report
from glm5_ascend.checkpoint.shards import Shard, TensorEntry, dtype_name
from glm5_ascend.errors import CheckpointError
from glm5_ascend.files.untrusted import MAX_BYTES_BY_TENSOR, read_json_object
from glm5_ascend.model.config import ModelConfig

#: Elements read at once where a tensor can be as large as an embedding table (GLM-5: 0.95e9).
PIECE = 1 << 24
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def inside(path: Path, directory: Path) -> bool:
    """Return True if `path`, links followed, lies in `directory`, or in the blobs of the hub cache of that snapshot."""
    # realpath: Path.resolve raises at a ring of links.
    target, home = Path(os.path.realpath(path)), Path(os.path.realpath(directory))
    in_cache = home.parent.name == "snapshots" and target.is_relative_to(home.parent.parent / "blobs")
    return target.is_relative_to(home) or in_cache


@dataclass
class LoadedCheckpoint:
    """All parts of a checkpoint that could be read.

    Attributes:
        raw: keys of config.json that belong to the language model, see `flat_keys`.
        entries: by the spec's spelling of the names, as are the keys of the description.
        description: content of quant_model_description.json, None if it cannot be read.
        file_of: tensor -> file, of tensors that exist or that an index promises.
        unreadable: tensors an index places in a file that is missing or damaged: reported once, with the file.
    """

    directory: Path
    config: ModelConfig
    raw: dict[str, Any]
    description: dict[str, object] | None = None
    shards: dict[str, Shard] = field(default_factory=dict)
    entries: dict[str, TensorEntry] = field(default_factory=dict)
    file_of: dict[str, str] = field(default_factory=dict)
    unreadable: set[str] = field(default_factory=set)

    def read_json(self, file: str) -> dict[str, object]:
        """The JSON object in a file of this directory.

        Raises:
            CheckpointError: it cannot be read, or is a link to the outside, which is not followed.
        """
        if not inside(self.directory / file, self.directory):
            raise CheckpointError(
                f"{self.directory / file}: a link to the outside is not followed", "replace the link by the file"
            )
        return read_json_object(self.directory / file, max_bytes=MAX_BYTES_BY_TENSOR)

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor in its stored dtype and shape.

        Raises:
            CheckpointError: it cannot be read, or not to its end.
        """
        return self.shards[self.file_of[name]].read(self.entries[name].name)

    def span(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self.shards[self.file_of[name]].read_span(self.entries[name], start, stop)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        columns = self.entries[name].shape[1]
        return self.span(name, start * columns, stop * columns).reshape(-1, columns)

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """The tensor's elements in order, flat, at most `PIECE` at a time."""
        entry = self.entries[name]
        total = (entry.end - entry.start) // entry.dtype.itemsize
        for start in range(0, total, PIECE):
            yield self.span(name, start, min(start + PIECE, total))


def check_stated_dtype(checkpoint: LoadedCheckpoint, report: Report) -> None:
    """An engine runs in the dtype of config.json: bf16 weights in float16 overflow, and deq_scale is read as int64."""
    count = Counter(entry.dtype for entry in checkpoint.entries.values())
    stored = max((torch.bfloat16, torch.float16), key=lambda dtype: count[dtype])
    for key in ("dtype", "torch_dtype"):
        stated = checkpoint.raw.get(key)
        if not count[stored] or stated not in ("bfloat16", "float16") or stated == dtype_name(stored):
            continue
        say = report.error if stated == "float16" else report.warning
        say(
            "config.dtype",
            f"{key} is {stated}, but {count[stored]} tensors are {dtype_name(stored)}: an engine would run in {stated}"
            + (", whose range is smaller" if stated == "float16" else ""),
            file="config.json",
            fix=f"restore {key} {dtype_name(stored)}, the source's",
        )
