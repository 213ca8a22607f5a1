"""The positions of the k largest of a row of fp32 scores, lowest position first among equals, without sorting."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import int32, int64, uint32
from numba.core import cgutils

from glm5_kernels.compiled.jit import inner
from glm5_kernels.compiled.simd import I32, I64, WIDTH, Lanes, call_llvm, intrinsic

_WORDS = ir.VectorType(I32, WIDTH)


@intrinsic(returns=int64, least=uint32)
def count_at_least(v: Lanes, values: Any, groups: Any, least: Any) -> Any:
    """Count the values >= `least` among `groups` times WIDTH uint32 at address `values`."""
    builder = v.builder
    threshold = v.broadcast(least)
    counts, first = cgutils.alloca_once(builder, _WORDS), builder.inttoptr(values, _WORDS.as_pointer())
    builder.store(ir.Constant(_WORDS, [0] * WIDTH), counts)
    with v.loop(groups) as group:
        loaded = builder.load(builder.gep(first, [group]))
        loaded.align = 4
        reached = builder.zext(builder.icmp_unsigned(">=", loaded, threshold), _WORDS)
        builder.store(builder.add(builder.load(counts), reached), counts)
    return builder.zext(call_llvm(builder, I32, "vector.reduce.add.v16i32", builder.load(counts)), I64)


@inner
def best_positions(scores: Any, first: Any, seen: Any, out: Any, row: Any, scratch: Any) -> None:
    """out[row] <- the positions p < seen with the largest scores[first + p], in ascending order; then -1.

    NaN is never selected. Scores become integers in the same order; the k-th largest is found bit by bit; one more pass
    over the row takes what is larger, and as many equals as are left.

    Args:
        scores: fp32 [>= first + seen].
        out: int32 [rows, k].
        scratch: uint32 [>= 2 * (seen + WIDTH)].
    """
    bits, positions, k = scores.view(np.uint32), seen + WIDTH, out.shape[1]
    for position in range(seen):
        scratch[position] = ordered(bits[first + position])
    least, ties = uint32(1), int64(seen)  # 0 is NaN: all others, if there are no more than k
    if seen > k:
        least, ties = kth_largest(scratch, seen, k)
    selected, equal = int64(0), int64(0)
    for position in range(seen):  # without a branch, which would be mispredicted at every other candidate
        value = scratch[position]
        same = int64(value == least)
        scratch[positions + selected] = uint32(position)
        selected += int64(value > least) + (same & int64(equal < ties))
        equal += same
    for column in range(k):
        out[row, column] = int32(scratch[positions + column]) if column < selected else int32(-1)


@inner
def kth_largest(values: Any, n: Any, k: Any) -> Any:
    """The k-th largest of uint32 values[:n], n > k, and how many equal to it are among the k largest.

    Zeros do not count: with fewer than k other values the result is 1, and all of them may be taken.
    values[n:n + WIDTH] become 0.

    Bit by bit: 32 passes over whole vectors take less time than one histogram.
    """
    for lane in range(WIDTH):
        values[n + lane] = 0
    groups, least, more = -(-n // WIDTH), uint32(0), int64(0)
    for bit in range(31, -1, -1):
        trial = uint32(least | uint32(1) << uint32(bit))
        count = count_at_least(values.ctypes.data, groups, trial)
        if count >= k:
            least = trial
        else:
            more = count  # the last of these trials is the k-th largest plus one
    return (least, k - more) if least else (uint32(1), int64(k))


@inner
def ordered(bits: Any) -> Any:
    """The bits of an fp32 as an unsigned integer in the same order; -0.0 and 0.0 are one value, NaN is 0."""
    if bits & uint32(0x7FFFFFFF) > uint32(0x7F800000):
        return uint32(0)
    if bits == uint32(0x80000000):
        bits = uint32(0)
    return bits ^ uint32(0xFFFFFFFF) if bits >> uint32(31) else bits ^ uint32(0x80000000)
