"""What Linux has of a file in its page cache."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import pytest
import torch


def cached(tensor: torch.Tensor) -> int:
    """Bytes of a mapped tensor, but for its ends, that Linux has in memory."""
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = (tensor.data_ptr() + tensor.nbytes - start) // mmap.PAGESIZE
    flags = (ctypes.c_ubyte * pages)()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(pages * mmap.PAGESIZE), flags) == 0
    return mmap.PAGESIZE * sum(flag & 1 for flag in flags)


def evict(path: Path, size: int) -> torch.Tensor:
    """The first `size` bytes of a file, mapped, after Linux has dropped them; skips the test if it keeps them."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    storage = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=size)
    content = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[arg-type]
    if cached(content) > size / 2:
        pytest.skip("this file system keeps its files in memory")
    return content
