"""The k largest of a row of fp32 scores, lowest position first among equals, without sorting the row."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import int32, int64, njit, uint32, uint64

_DIGIT = 12  # bits of the score that are counted


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def best_positions(scores: Any, seen: Any, k: Any, out: Any, keys: Any) -> None:
    """out[:k] <- the positions p < seen with the largest scores[p], best first; then -1.

    NaN is never chosen. Scores become integers in the same order, the upper 12 bits are counted, and
    only positions at or above the bin of the k-th are sorted.

    Args:
        scores: fp32 [>= seen].
        out: int32 [k].
        keys: uint64 [>= seen], scratch.
    """
    bins = np.zeros(1 << _DIGIT, np.int32)
    bits = scores[:seen].view(np.uint32)
    for position in range(seen):
        if scores[position] == scores[position]:
            bins[_ordered(bits[position]) >> uint32(32 - _DIGIT)] += 1
    threshold, above = (1 << _DIGIT) - 1, int64(0)
    while threshold > 0 and above + bins[threshold] < k:
        above += bins[threshold]
        threshold -= 1
    found = 0
    for position in range(seen):
        value = _ordered(bits[position])
        if int64(value >> uint32(32 - _DIGIT)) >= threshold and scores[position] == scores[position]:
            # Smallest key first: the largest score, then the lowest position.
            keys[found] = (uint64(uint32(0xFFFFFFFF) - value) << uint64(32)) | uint64(position)
            found += 1
    chosen = np.sort(keys[:found])
    for place in range(k):
        out[place] = int32(chosen[place] & uint64(0xFFFFFFFF)) if place < found else int32(-1)


@njit(nogil=True, cache=True, inline="always")  # type: ignore[untyped-decorator]
def _ordered(bits: Any) -> Any:
    """The bits of an fp32 as an unsigned integer in the same order; -0.0 and 0.0 are one value."""
    if bits == uint32(0x80000000):
        bits = uint32(0)
    return bits ^ uint32(0xFFFFFFFF) if bits >> uint32(31) else bits ^ uint32(0x80000000)
