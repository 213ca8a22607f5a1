"""One reading of every shard: hashes, finite floats, and the rows of integers, while the bytes are in the cache.

Each thread reads one shard, from its first byte to its last, in pieces of 2 MiB; a second one hashes them.
Two pieces, and a few numbers per row of one linear, are the memory of a thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import torch

from glm5_ascend.checkpoint.checks.loaded_checkpoint import FLOATS
from glm5_ascend.checkpoint.checks.report import Report
from glm5_ascend.checkpoint.nonsense import text_in
from glm5_ascend.checkpoint.schemes import FLOAT
from glm5_ascend.checkpoint.shards import Shard, TensorEntry
from glm5_ascend.checkpoint.workers import Workers, cores
from glm5_ascend.errors import CheckpointError
from glm5_ascend.verify.checked import Checked
from glm5_ascend.verify.derived_tensors import check_linear
from glm5_ascend.verify.float_values import FloatSums
from glm5_ascend.verify.integer_rows import IntegerRows
from glm5_ascend.verify.plausible import Doubts

#: Pieces that stay in a core's cache while all checks look at them; a row of more is read whole.
_PIECE_BYTES = 1 << 21


def read_once(checked: Checked, hashed: Collection[str], report: Report, doubts: Doubts) -> dict[str, str]:
    """Read all shards; set `checked.non_finite`, and remove their modules from `checked.complete`.

    Args:
        hashed: files whose sha256 is wanted.
        report: gets what is wrong; `doubts`: what is possible, but not plausible.
    Returns:
        File -> sha256, of the shards that were to be hashed and could be read.
    """
    checkpoint = checked.checkpoint
    by_size = sorted(checkpoint.shards, key=lambda file: -checkpoint.shards[file].path.stat().st_size)
    with Workers(min(cores(), max(len(by_size), 1))) as workers:
        reader = _Reader(checked, hashed, doubts, workers)
        workers.for_each(reader.shard, by_size)
    position = {name: index for index, name in enumerate(checkpoint.entries)}
    floats, linears = (
        sorted(partial.findings, key=lambda finding: position[finding.tensor or ""])
        for partial in (reader.floats, reader.linears)
    )
    checked.non_finite = {finding.tensor or "" for finding in floats}
    modules = {name.rpartition(".")[0] for name in checked.non_finite}
    checked.complete -= checked.non_finite | modules
    # Of a linear with a tensor that is not finite, that one is named.
    report.findings += [*floats, *(f for f in linears if (f.tensor or "").rpartition(".")[0] not in modules)]
    return reader.hashes


class _Reader:
    """Reads shards; several threads may call `shard`."""

    def __init__(self, checked: Checked, hashed: Collection[str], doubts: Doubts, workers: Workers) -> None:
        self.checked, self.checkpoint, self.hashed, self.doubts = checked, checked.checkpoint, hashed, doubts
        self.workers = workers
        self.floats, self.linears = Report(self.checkpoint.directory), Report(self.checkpoint.directory)
        self.floats.file_of = self.linears.file_of = self.checkpoint.file_of
        self.hashes: dict[str, str] = {}

    def shard(self, file: str) -> None:
        """Read one shard; of a hash that is missing then `check_hashes` says why."""
        shard, spelled = self.checkpoint.shards[file], self.checkpoint.config.spec.spelled
        entries = (replace(entry, name=spelled(entry.name)) for entry in shard.entries.values())
        with _Hasher() as hasher:
            whole = file in self.hashed and hasher.header(shard)
            for entry in sorted(entries, key=lambda entry: (entry.start, entry.end)):
                values = self._values(entry) if self.checkpoint.file_of.get(entry.name) == file else None
                if values is None and not whole:
                    continue
                try:
                    text = None
                    for piece in self._pieces(shard, entry, values):
                        if whole:
                            hasher.add(piece)
                        if values is not None and not text:
                            values.add(piece)
                        text = text or text_in(piece)  # last: the piece is in a cache then
                    if text:
                        self.floats.error(
                            "value.text", text, tensor=entry.name, fix="copy the file again, or quantize again"
                        )
                    else:
                        self._finish(entry, values)
                except CheckpointError as error:
                    whole = False
                    if values is not None:
                        report = self.floats if isinstance(values, FloatSums) else self.linears
                        report.error("shard.damaged", error.message, tensor=entry.name, fix=error.tip)
        if whole:
            self.hashes[file] = hasher.digest.hexdigest()

    def _values(self, entry: TensorEntry) -> FloatSums | IntegerRows | None:
        """Return what collects the values of a tensor; None if they are not looked at here."""
        module, _, suffix = entry.name.rpartition(".")
        if entry.dtype in FLOATS:
            return FloatSums(entry)
        scheme = self.checked.schemes.get(module, FLOAT)
        looked_at = suffix == "weight" and scheme != FLOAT and module in self.checked.complete
        return IntegerRows(module, scheme) if looked_at else None

    def _pieces(
        self, shard: Shard, entry: TensorEntry, values: FloatSums | IntegerRows | None
    ) -> Iterator[torch.Tensor]:
        columns = entry.shape[1] if isinstance(values, IntegerRows) else 1
        step = max(_PIECE_BYTES // (columns * entry.dtype.itemsize), 1) * columns
        total = entry.nbytes // entry.dtype.itemsize
        for start in range(0, total, step):
            if self.workers.stopping:
                return
            piece = shard.read_span(entry, start, min(start + step, total))
            yield piece.view(-1, columns) if columns > 1 else piece

    def _finish(self, entry: TensorEntry, values: FloatSums | IntegerRows | None) -> None:
        if isinstance(values, FloatSums):
            values.finish(self.floats, self.doubts)
        elif values is not None:
            module = entry.name.rpartition(".")[0]
            check_linear(self.checkpoint, module, self.checked.schemes[module], values, self.linears, self.doubts)


class _Hasher:
    """The hash of one shard; a thread of its own adds a piece while the checks look at it."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="hash")
        self._adding: Future[None] | None = None

    def __enter__(self) -> _Hasher:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def header(self, shard: Shard) -> bool:
        try:
            with shard.path.open("rb") as file:
                self.digest.update(file.read(shard.data_start))
        except OSError:
            return False
        return True

    def add(self, piece: torch.Tensor) -> None:
        if self._adding is not None:
            self._adding.result()  # at most two pieces are in memory
        self._adding = self._pool.submit(self.digest.update, piece.view(torch.uint8).numpy().data)
