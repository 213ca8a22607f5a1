"""A directory of safetensors shards and the index json over them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch

from glm5_ascend.checkpoint.shards import Shard, TensorEntry
from glm5_ascend.errors import CheckpointError
from glm5_ascend.files.untrusted import MAX_BYTES_BY_TENSOR, read_json_object

#: The only index name vLLM reads. Without it every *.safetensors of the directory is loaded.
INDEX_NAME = "model.safetensors.index.json"


def read_weight_map(directory: Path, index: str = INDEX_NAME) -> dict[str, str] | None:
    """`{tensor: file name}` of an index file, or None if there is none.

    File names must be plain names inside the directory: anything else is refused, it is never opened.
    """
    path = directory / index
    if not path.exists():
        return None
    weight_map = read_json_object(path, max_bytes=MAX_BYTES_BY_TENSOR).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{path}: no weight_map", "copy the file again")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{path}: {tensor}: {name!r} is not the name of a shard in this directory", "copy it again"
            )
    return weight_map


class CheckpointDir:
    """All tensors of a checkpoint directory by name; headers are read once, data on demand.

    Args:
        spelled: gives the name by which a stored tensor is asked for, see `Architecture.spelled`.
    """

    def __init__(self, directory: Path, spelled: Callable[[str], str] = str) -> None:
        self.directory, self.spelled = directory, spelled
        weight_map = read_weight_map(directory)
        files = sorted(set(weight_map.values()) if weight_map else {p.name for p in directory.glob("*.safetensors")})
        if not files:
            raise CheckpointError(f"{directory}: no *.safetensors files", "give the directory of a GLM-5 checkpoint")
        missing = [name for name in files if not (directory / name).is_file()]
        if missing:
            what = f"{directory / missing[0]}: not found, but {INDEX_NAME} lists it"
            if len(missing) > 1:
                what = f"{directory}: {len(missing)} of {len(files)} files of the index are missing, first {missing[0]}"
            raise CheckpointError(what, "download or copy what is missing")
        self.shards = {name: Shard(directory / name) for name in files}
        self.file_of: dict[str, str] = {}
        self.entries: dict[str, TensorEntry] = {}
        for name, file in (self._locate() if weight_map is None else weight_map).items():
            if name not in self.shards[file].entries:
                raise CheckpointError(
                    f"{directory / file}: no tensor {name}, but {INDEX_NAME} lists it", "copy both again"
                )
            if (same := self.entries.get(spelled(name))) is not None:
                raise CheckpointError(f"{directory}: {same.name} and {name} are one tensor of the model", "remove one")
            self._add(name, file, self.shards[file])

    def unlisted(self) -> dict[str, Shard]:
        """Shards that lie in the directory although the index does not know them."""
        paths = sorted(self.directory.glob("*.safetensors"))
        return {path.name: Shard(path) for path in paths if path.name not in self.shards}

    def add_unlisted(self, prefixes: tuple[str, ...]) -> list[str]:
        """Add tensors whose names begin so from shards that the index does not list; returns these files.

        Some checkpoints carry the MTP layer in such a shard. Nothing else is taken from one: an index that forgets the
        main model's tensors is damaged.
        """
        added = set()
        for file, shard in self.unlisted().items():
            for name in shard.entries:
                if name.startswith(prefixes) and name not in self:
                    self._add(name, file, shard)
                    added.add(file)
        return sorted(added)

    def _add(self, name: str, file: str, shard: Shard) -> None:
        ours = self.spelled(name)
        self.shards[file], self.file_of[ours], self.entries[ours] = shard, file, shard.entries[name]

    def _locate(self) -> dict[str, str]:
        """Without an index the shards themselves say what they hold; a tensor in two of them is an error."""
        file_of: dict[str, str] = {}
        for file, shard in self.shards.items():
            for name in shard.entries:
                if name in file_of:
                    raise CheckpointError(f"{self.directory}: {name} is in {file_of[name]} and in {file}", "remove one")
                file_of[name] = file
        return file_of

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries.values())

    def __contains__(self, name: str) -> bool:
        return name in self.file_of

    def read(self, name: str) -> torch.Tensor:
        entry = self._entry(name)
        return self.shards[self.file_of[name]].read(entry.name)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows `start` to `stop` of a tensor in its stored dtype; nothing else of it is read."""
        shape = self._entry(name).shape
        width = math.prod(shape[1:])
        return self.read_span(name, start * width, stop * width).reshape(stop - start, *shape[1:])

    def read_span(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements `start` to `stop` of a tensor's flat data in its stored dtype."""
        entry = self._entry(name)
        return self.shards[self.file_of[name]].read_span(entry, start, stop)

    def read_ahead(self, name: str) -> int:
        """Ask the system to read a tensor into its cache meanwhile; returns its bytes, 0 if there is none."""
        if name not in self:
            return 0
        return self.shards[self.file_of[name]].read_ahead(self.entries[name], 0, math.prod(self.entries[name].shape))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def _entry(self, name: str) -> TensorEntry:
        if name not in self:
            raise CheckpointError(f"{self.directory}: no tensor {name}", "the checkpoint is incomplete: copy it again")
        return self.entries[name]
