"""The k largest of a row of fp32 scores, lowest position first among equals, without sorting the row."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import int32, int64, njit, uint32

_DIGIT = 12  # bits of the score that are counted
_PASS, _FEW = 11, 8  # bits of a pass of the sort, of many and of few values


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def best_positions(scores: Any, seen: Any, k: Any, out: Any, keys: Any) -> None:
    """out[:k] <- the positions p < seen with the largest scores[p], best first; then -1.

    NaN is never chosen. Scores become integers in the same order, the upper 12 bits are counted, and
    only positions at or above the bin of the k-th are sorted.

    Args:
        scores: fp32 [>= seen].
        out: int32 [k].
        keys: uint32 [4, >= seen], scratch.
    """
    bits, values, positions = scores.view(np.uint32), keys[0], keys[1]
    for position in range(seen):
        values[position] = _ordered(bits[position])
    bins = np.zeros(1 << _DIGIT, np.int32)
    for position in range(seen):
        bins[values[position] >> uint32(32 - _DIGIT)] += 1
    threshold, above = (1 << _DIGIT) - 1, int64(0)
    while threshold > 1 and above + bins[threshold] < k:  # bin 0 holds NaN alone
        above += bins[threshold]
        threshold -= 1
    found, least = int64(0), uint32(threshold << (32 - _DIGIT))
    for position in range(seen):  # without a branch, which would be guessed wrong at every other candidate
        value = values[position]
        values[found], positions[found] = value, uint32(position)
        found += int64(value >= least)
    _sort_descending(keys, found)
    for place in range(k):
        out[place] = int32(positions[place]) if place < found else int32(-1)


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _sort_descending(keys: Any, n: Any) -> None:
    """Rows 0 (values) and 1 (positions) of keys[:, :n] by value, largest first, equal ones in their order."""
    width = _FEW if n < 1 << _PASS else _PASS  # counting digits takes as long as there are digits
    mask = uint32((1 << width) - 1)
    starts = np.empty((1 << width) + 1, np.int64)
    for shift in range(0, 32, width):
        for digit in range(len(starts)):
            starts[digit] = 0
        for i in range(n):
            starts[int64(mask - (keys[0, i] >> uint32(shift) & mask)) + 1] += 1
        for digit in range(1 << width):
            starts[digit + 1] += starts[digit]
        for i in range(n):
            digit = int64(mask - (keys[0, i] >> uint32(shift) & mask))
            keys[2, starts[digit]], keys[3, starts[digit]] = keys[0, i], keys[1, i]
            starts[digit] += 1
        for i in range(n):  # not as slices: those take numba 2.5 s to compile
            keys[0, i], keys[1, i] = keys[2, i], keys[3, i]


@njit(nogil=True, cache=True, inline="always")  # type: ignore[untyped-decorator]
def _ordered(bits: Any) -> Any:
    """The bits of an fp32 as an unsigned integer in the same order; -0.0 and 0.0 are one value, NaN is 0."""
    if bits & uint32(0x7FFFFFFF) > uint32(0x7F800000):
        return uint32(0)
    if bits == uint32(0x80000000):
        bits = uint32(0)
    return bits ^ uint32(0xFFFFFFFF) if bits >> uint32(31) else bits ^ uint32(0x80000000)
