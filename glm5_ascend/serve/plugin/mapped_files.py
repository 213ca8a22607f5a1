"""The checkpoint's files as they are mapped into this process: huge pages, and read before a token needs them."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from pathlib import Path

from glm5_ascend.serve.memory import available

#: Linux's madvise: huge pages where the file system has them; read now (5.14 and later).
_MADV_HUGEPAGE, _MADV_POPULATE_READ = 14, 22
_MAPPING = re.compile(r"(?P<start>[0-9a-f]+)-(?P<end>[0-9a-f]+) .*? (?P<path>/.*\.safetensors)")


def read_ahead(directory: Path) -> None:
    """Ask Linux for huge pages of the mapped files of a directory, and read them if they fit into the memory.

    A machine with less memory reads what it needs, when it needs it. Other systems and older kernels ignore this.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "madvise"):
        return
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    mappings = list(_mappings(directory.resolve()))
    fit = sum(size for _, size in mappings) < available()
    for start, size in mappings:
        libc.madvise(start, size, _MADV_HUGEPAGE)
        if fit:
            libc.madvise(start, size, _MADV_POPULATE_READ)


def _mappings(directory: Path) -> Iterator[tuple[int, int]]:
    maps = Path("/proc/self/maps")
    for match in map(_MAPPING.fullmatch, maps.read_text(errors="replace").splitlines() if maps.exists() else ()):
        if match and Path(match["path"]).parent == directory:
            start, end = int(match["start"], 16), int(match["end"], 16)
            yield start, end - start
