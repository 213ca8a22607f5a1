"""Memory that a step frees is kept for the next one: otherwise the kernel takes it back and clears it again each time.

A prefill of 2048 tokens allocates results of several MiB in every layer. glibc maps each of them anew, and the kernel
has to clear their pages, which took a fifth of the prefill. `mallopt` changes that for this process; other allocators
ignore it.
"""

from __future__ import annotations

import ctypes

#: glibc's malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
#: Allocations up to this size come from the heap: the most that glibc takes.
_LARGEST = 32 << 20
#: Free bytes at the end of the heap that stay there, and by how much it grows.
_KEPT, _GROWTH = 256 << 20, 16 << 20


def keep_freed_memory() -> None:
    """For the rest of this process, where the C library is glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in ((_MMAP_THRESHOLD, _LARGEST), (_TRIM_THRESHOLD, _KEPT), (_TOP_PAD, _GROWTH)):
            mallopt(option, value)
