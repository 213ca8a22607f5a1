"""The positions of the k largest of a row of fp32 scores, lowest position first among equals, without sorting."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import int32, int64, uint32

from glm5_kernels.compiled.jit import inner

_DIGIT = 12  # bits of the score that are counted at once: 12, 12 and the last 8


@inner
def best_positions(scores: Any, first: Any, seen: Any, out: Any, row: Any, scratch: Any) -> None:
    """out[row] <- the positions p < seen with the largest scores[first + p], in ascending order; then -1.

    NaN is never chosen. Scores become integers in the same order; the k-th largest is found digit by digit, each pass
    only over those that share the digits before; one more pass over the row takes what is larger, and as many equals
    as are left.

    Args:
        scores: fp32 [>= first + seen].
        out: int32 [rows, k].
        scratch: uint32 [>= 2 * (seen + 1)].
    """
    bits, positions, k = scores.view(np.uint32), seen + 1, out.shape[1]
    for position in range(seen):
        scratch[position] = _ordered(bits[first + position])
    least, ties = uint32(1), int64(seen)  # 0 is NaN: all others, if there are no more than k
    if seen > k:
        least, ties = _kth_largest(scratch, seen, k, positions)
    found, equal = int64(0), int64(0)
    for position in range(seen):  # without a branch, which would be guessed wrong at every other candidate
        value = scratch[position]
        same = int64(value == least)
        scratch[positions + found] = uint32(position)
        found += int64(value > least) + (same & int64(equal < ties))
        equal += same
    for place in range(k):
        out[row, place] = int32(scratch[positions + place]) if place < found else int32(-1)


@inner
def _kth_largest(values: Any, n: Any, k: Any, candidates: Any) -> Any:
    """The k-th largest of uint32 values[:n], n > k, and how many equal to it are among the k largest.

    Zeros are no values: with fewer than k others it is 1, and all of them may be taken. values from `candidates` on:
    room for n more.
    """
    bins = np.empty(1 << _DIGIT, np.int32)
    left, prefix, source, shift = int64(k), uint32(0), int64(0), 32
    while shift > 0:
        width = min(_DIGIT, shift)
        shift -= width
        mask = uint32((1 << width) - 1)
        for digit in range(1 << width):
            bins[digit] = 0
        for i in range(n):
            bins[values[source + i] >> uint32(shift) & mask] += 1
        digit = int64(mask)
        while digit > 0 and bins[digit] < left:
            left -= bins[digit]
            digit -= 1
        prefix |= uint32(digit) << uint32(shift)
        found = int64(0)
        for i in range(n):
            value = values[source + i]
            values[candidates + found] = value
            found += int64(value >> uint32(shift) & mask == uint32(digit))
        n, source = found, candidates
    return (prefix, left) if prefix else (uint32(1), left)


@inner
def _ordered(bits: Any) -> Any:
    """The bits of an fp32 as an unsigned integer in the same order; -0.0 and 0.0 are one value, NaN is 0."""
    if bits & uint32(0x7FFFFFFF) > uint32(0x7F800000):
        return uint32(0)
    if bits == uint32(0x80000000):
        bits = uint32(0)
    return bits ^ uint32(0xFFFFFFFF) if bits >> uint32(31) else bits ^ uint32(0x80000000)
