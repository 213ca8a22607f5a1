"""The checkpoint's files as they are mapped into this process: huge pages, and read before a token needs them."""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import torch

from glm5_ascend.checkpoint.index import CheckpointDir
from glm5_ascend.serve.memory import available

#: Linux's madvise: read soon; huge pages where the file system has them; read now (5.14 and later).
_MADV_WILLNEED, _MADV_HUGEPAGE, _MADV_POPULATE_READ = 3, 14, 22
_MAPPING = re.compile(r"(?P<start>[0-9a-f]+)-(?P<end>[0-9a-f]+) .*? (?P<path>/.*\.safetensors)")


Weights = Iterable[tuple[str, torch.Tensor]]


def mapped_tensors(directory: Path, weights: Weights) -> Weights:
    """Name and view of every tensor of a checkpoint, file by file, in place of `weights`; nothing is read.

    The safetensors library looks at each tensor, and Linux then reads megabytes around: all of the file.
    """
    if not directory.is_dir():  # a name of the hub
        yield from weights
        return
    next(iter(weights))  # starts vLLM's clock
    for shard in CheckpointDir(directory).shards.values():
        storage = torch.UntypedStorage.from_file(str(shard.path), shared=False, nbytes=shard.path.stat().st_size)
        file = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[arg-type]
        for name, entry in shard.entries.items():
            data = file[entry.start : entry.end]
            data = data.clone() if entry.start % entry.dtype.itemsize else data
            yield name, data.view(entry.dtype).view(entry.shape)


def read_ahead(directory: Path, weights: Iterable[torch.Tensor], rank: int = 0, ranks: int = 1) -> None:
    """Ask Linux for huge pages of the mapped files of a directory, and read these weights if they fit into the memory.

    A page lies on the NUMA node of the process that reads it first: each rank of tensor parallel gives its rows here.
    Where it has columns of all rows, it reads its share of the rows. A machine with less memory reads what it needs,
    when it needs it. Other systems and older kernels ignore this.
    """
    for start, size in _mappings(directory.resolve()):
        _madvise()(start, size, _MADV_HUGEPAGE)
    parts = [weight if weight.is_contiguous() else weight.chunk(ranks)[rank] for weight in weights if weight.numel()]
    if ranks * sum(map(_extent, parts)) < available():
        for part in parts:
            _advise(part, _MADV_POPULATE_READ)


def will_need(tensors: Iterable[torch.Tensor]) -> None:
    """Ask Linux to read these tensors of mapped files, all at once, and nothing around them."""
    for tensor in tensors:
        _advise(tensor, _MADV_WILLNEED)


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to its last one."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()


def _advise(tensor: torch.Tensor, advice: int) -> None:
    start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    _madvise()(start, tensor.data_ptr() + _extent(tensor) - start, advice)


@cache
def _madvise() -> Callable[[int, int, int], int]:
    function = getattr(ctypes.CDLL(None), "madvise", None)
    if function is None:
        return lambda start, size, advice: -1
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function  # type: ignore[no-any-return]


def _mappings(directory: Path) -> Iterator[tuple[int, int]]:
    maps = Path("/proc/self/maps")
    for match in map(_MAPPING.fullmatch, maps.read_text(errors="replace").splitlines() if maps.exists() else ()):
        if match and Path(match["path"]).parent == directory:
            start, end = int(match["start"], 16), int(match["end"], 16)
            yield start, end - start
