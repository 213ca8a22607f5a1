"""What the loader would see of a checkpoint directory: tensors by name, read in pieces of bounded size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from glm5_ascend.checkpoint.shards import Shard, TensorEntry
from glm5_ascend.errors import CheckpointError
from glm5_ascend.model.config import ModelConfig
from glm5_ascend.model.json_file import MAX_BYTES_BY_TENSOR, read_json_object
from glm5_ascend.verify.stray_files import inside

#: Elements read at once where a tensor can be as large as an embedding table (GLM-5: 0.95e9).
PIECE = 1 << 24
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass
class LoadedCheckpoint:
    """Everything that could be read, whatever else is broken.

    Attributes:
        raw: config.json as parsed JSON.
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
        return self.shards[self.file_of[name]].read(name)

    def span(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements `start` to `stop` of the tensor, flat."""
        return self.shards[self.file_of[name]].read_span(self.entries[name], start, stop)

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """The tensor's elements in order, flat, at most `PIECE` at a time."""
        entry = self.entries[name]
        total = (entry.end - entry.start) // entry.dtype.itemsize
        for start in range(0, total, PIECE):
            yield self.span(name, start, min(start + PIECE, total))
