"""The checkpoint's files as they are mapped into this process: huge pages, and read before a token needs them."""

from __future__ import annotations

import ctypes
import mmap
import sys
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from glm5_ascend.checkpoint.index import CheckpointDir
from glm5_ascend.checkpoint.shards import requests
from glm5_ascend.files.cgroups import available_memory
from glm5_ascend.serve.memory import FROM_DISK

#: Linux's madvise: nothing around is used; read soon; huge pages where the file system has them; take out of memory;
#: read now (5.14 and later).
_MADV_RANDOM, _MADV_WILLNEED, _MADV_HUGEPAGE, _MADV_PAGEOUT, _MADV_POPULATE_READ = 1, 3, 14, 21, 22
#: A reader's threads, and the bytes of which each reads at a time: whole huge pages.
_THREADS, _PIECE, _HUGE_PAGE = 8, 2**22, 2**21

#: First and last address.
Piece = tuple[int, int]
#: A module that is called, and the module that has the weights of this call.
Step = tuple[torch.nn.Module, torch.nn.Module]


class MappedFiles:
    """All files of a checkpoint, mapped; nothing is read.

    The safetensors library looks at each tensor, and Linux then reads megabytes around: all of the file.

    Attributes:
        checkpoint: the files' headers.
        fit: the weights fit into the memory; False stays so, as the draft model follows the target.
    """

    def __init__(self, directory: Path) -> None:
        self.checkpoint, self.fit = CheckpointDir(directory), True
        self._storages = {
            shard.path: torch.UntypedStorage.from_file(str(shard.path), shared=False, nbytes=shard.path.stat().st_size)
            for shard in self.checkpoint.shards.values()
        }
        self.mappings = sorted((storage.data_ptr(), storage.nbytes()) for storage in self._storages.values())

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and view of every tensor, file by file; one that does not lie on a multiple of its items is copied."""
        for shard in self.checkpoint.shards.values():
            file = torch.empty(0, dtype=torch.uint8).set_(self._storages[shard.path])  # type: ignore[arg-type]
            for name, entry in shard.entries.items():
                data = file[entry.start : entry.end]
                data = data.clone() if entry.start % entry.dtype.itemsize else data
                yield name, data.view(entry.dtype).view(entry.shape)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return True for a tensor in one of the files."""
        index = bisect(self.mappings, (tensor.data_ptr(), sys.maxsize)) - 1
        return index >= 0 and tensor.data_ptr() < sum(self.mappings[index])

    def read_ahead(
        self,
        weights: Iterable[torch.Tensor],
        embeddings: Iterable[torch.Tensor] = (),
        rank: int = 0,
        ranks: int = 1,
        cache_bytes: int = 0,
    ) -> bool:
        """Ask Linux for huge pages of the files, and read these weights if they fit into the memory.

        A page lies on the NUMA node of the process that reads it first: each rank of tensor parallel gives its rows
        here. Where it has columns of all rows, it reads its share of the rows. Older kernels ignore this.

        Args:
            embeddings: weights of which a token uses one row. Linux reads them, too, but this process maps only the
                rows that it uses.
            cache_bytes: of each rank's keys and latents, which are not allocated yet.

        Returns:
            `fit`; False was printed to stderr as `memory.FROM_DISK`.
        """
        for start, size in self.mappings:
            _madvise()(start, size, _MADV_HUGEPAGE)
        reads = [(weight, _read) for weight in weights] + [(embedding, _request) for embedding in embeddings]
        pieces = [
            (_piece(weight if weight.is_contiguous() else weight.chunk(ranks)[rank]), read)
            for weight, read in reads
            if weight.numel() and self.holds(weight)
        ]
        needed = sum(end - start for (start, end), _ in pieces) + cache_bytes
        self.fit = self.fit and ranks * needed < available_memory()
        if not self.fit:
            print(FROM_DISK, file=sys.stderr, flush=True)
            return False
        for piece, read in pieces:
            read(piece)
        return True


@cache
def mapped_files(directory: Path) -> MappedFiles:
    """The files of a directory, mapped once per process."""
    return MappedFiles(directory)


class Reader:
    """Reads weights in mapped files before a step uses them, in large pieces and many at a time.

    A product that touches what is not in memory waits for one page after the other, and leaves the disk's queue empty.
    Where not even the weights that every token uses fit, Linux would take each away shortly before its next use. Then
    some stay, and the rest makes room as soon as it was used. Measured: 6.8 GB of weights with 4 GB of memory, 2.16 s
    per token, 1.46 GB/s of a disk that gives one reading thread 0.94 (benchmarks/results/bench_low_memory.md).
    """

    def __init__(self, files: MappedFiles, ranks: int = 1) -> None:
        self._files, self._share = files, available_memory() // (3 * ranks)
        for start, size in files.mappings:
            # RANDOM: a huge page, and nothing behind it. Where there are none it would be a small page.
            if not _madvise()(start, size, _MADV_HUGEPAGE):
                _madvise()(start, size, _MADV_RANDOM)
        # Experts are needed at once, and do not wait for what the next step needs.
        self._now, self._next = (ThreadPoolExecutor(_THREADS, f"glm5-reader-{name}") for name in ("now", "next"))
        self._experts: list[tuple[Future[None], Piece]] = []

    def follow(self, model: torch.nn.Module, steps: Sequence[Step]) -> None:
        """Read the weights of each step while the one before computes, and experts as soon as they are chosen.

        Args:
            steps: modules in the order of their calls, and the module that has the weights of each.
        """
        module: Any
        for module in model.modules():
            if hasattr(module, "reader"):
                module.reader = self
        # Weights are where they will be from the first call on.
        plan = cache(lambda: self._plan([list(self.pieces(_weights(weights))) for _, weights in steps]))
        for index, (called, _) in enumerate(steps):
            called.register_forward_pre_hook(lambda *_, index=index: self._begin(*plan(), index))

    def read(self, tensors: Iterable[torch.Tensor]) -> None:
        """Begin to read those of the tensors that are in the files, in this order, up to a third of the memory.

        A step of many tokens may use them slower than the disk reads, and more would take the place of unused ones.
        """
        left = self._share
        for piece in self.pieces(tensors):
            left -= piece[1] - piece[0]
            if left < 0:
                return
            self._experts.append((self._now.submit(_read, piece), piece))

    def _plan(self, steps: list[list[Piece]]) -> tuple[list[list[Piece]], list[list[Piece]]]:
        """The pieces of each step, and those of them that make room after it."""
        sizes = list(accumulate(sum(end - start for start, end in pieces) for pieces in steps))
        self._makes_room = sizes[-1] > self._share
        return steps, [pieces if size > self._share else [] for pieces, size in zip(steps, sizes, strict=True)]

    def _begin(self, steps: list[list[Piece]], leaving: list[list[Piece]], index: int) -> None:
        """Read what the step after this one uses; what the step before has used makes room."""
        experts, self._experts = self._experts, []
        if self._makes_room:
            for future, _ in experts:
                future.cancel()
            self._next.submit(_make_room, [*leaving[index - 1], *(piece for _, piece in experts)])
        for piece in steps[(index + 1) % len(steps)]:
            self._next.submit(_read, piece)

    def pieces(self, tensors: Iterable[torch.Tensor]) -> Iterator[Piece]:
        """The pieces of tensors that are in the files, in their order; neighbours together."""
        start = end = 0
        for tensor in filter(self._files.holds, tensors):
            first, last = _piece(tensor)
            if not start <= first <= end + mmap.PAGESIZE:
                yield from _cut(start, end)
                start = end = first
            end = max(end, last)
        yield from _cut(start, end)


def _cut(start: int, end: int) -> Iterator[Piece]:
    while start < end:
        stop = min(end, start // _PIECE * _PIECE + _PIECE)
        yield start, stop
        start = stop


def _piece(tensor: torch.Tensor) -> Piece:
    """Addresses of a tensor's first page and of its end."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start // mmap.PAGESIZE * mmap.PAGESIZE, start + (steps + 1) * tensor.element_size()


def _read(piece: Piece) -> None:
    start, end = piece
    if _madvise()(start, end - start, _MADV_POPULATE_READ):
        _request(piece)


def _request(piece: Piece) -> None:
    """Ask Linux to read a piece, without mapping it."""
    for start, size in requests(*piece):
        _madvise()(start, size, _MADV_WILLNEED)


def _make_room(pieces: Iterable[Piece]) -> None:
    for start, end in pieces:  # whole huge pages
        start = start // _HUGE_PAGE * _HUGE_PAGE
        _madvise()(start, -(-end // _HUGE_PAGE) * _HUGE_PAGE - start, _MADV_PAGEOUT)


def _weights(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The weights of a module but those of routed experts, fused ones in their parts."""
    for inside in module.modules():
        yield from (parameter.data for parameter in inside.parameters(recurse=False))
        yield from (weights.weight for weights in getattr(inside, "op_parts", ()))


def will_need(tensors: Iterable[torch.Tensor]) -> None:
    """Ask Linux to read these tensors of mapped files, all at once, and nothing around them."""
    for tensor in tensors:
        _request(_piece(tensor))


@cache
def _madvise() -> Callable[[int, int, int], int]:
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function
