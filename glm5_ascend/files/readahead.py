"""How much of a file Linux reads ahead at a request."""

from __future__ import annotations

from collections.abc import Iterator

#: Bytes of a WILLNEED that Linux reads for certain: it ignores what exceeds a device's read-ahead, by default 128 KiB.
REQUEST = 2**17


def requests(start: int, end: int) -> Iterator[tuple[int, int]]:
    """Cut bytes `start` to `end` of a file or of a mapping into (start, size) for posix_fadvise or madvise."""
    for first in range(start, end, REQUEST):
        yield first, min(REQUEST, end - first)
