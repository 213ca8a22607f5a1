"""bf16 products of a few tokens with rows of a weight, each read once in the order of memory (VDPBF16PS)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from glm5_kernels.compiled.jit import kernel
from glm5_kernels.compiled.rows import (
    RowAddress,
    load_row_as_fp32,
    prefetch_line,
    row_address,
    store_row_as,
)
from glm5_kernels.compiled.simd import (
    FP32,
    PAIRS,
    STEP,
    WIDTH,
    Lanes,
    aligned_fp32,
    i64_const,
    intrinsic,
    shuffled,
    sum_each,
)
from glm5_kernels.compiled.task_rows import AHEAD, LINES, TASK_ROWS, TileSums, address_of, padded_tokens, task_rows
from glm5_kernels.compiled.threads import LEAST_BYTES, run_ranges

#: More tokens are torch's.
MOST = 16


def takes(x: torch.Tensor, w: torch.Tensor) -> bool:
    """True if `per_head` is the fastest product of x [T, H, K] and w [H, N, K] on this CPU."""
    n, k = w.shape[1:]
    rows = not n % WIDTH and not k % (2 * WIDTH) and x.stride(2) == w.stride(2) == 1
    return PAIRS and rows and 0 < len(x) <= MOST and x.dtype == w.dtype == torch.bfloat16


def per_head(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x bf16 [T, H, K] times w bf16 [H, N, K] transposed -> bf16 [T, H, N], summed in fp32."""
    (tokens, heads, k), n = x.shape, w.shape[1]
    out = x.new_empty(tokens, heads, n)
    tasks = heads * -(-n // TASK_ROWS)
    size = LEAST_BYTES // (2 * k * TASK_ROWS)
    run_ranges(_per_head, tasks, size, (tokens, n, k), row_address(x), row_address(w), row_address(out))
    return out


def _tile(tokens: int) -> Any:
    """The intrinsic out <- `tokens` tokens times LINES rows of `columns` bf16, `distance` bytes apart.

    ahead: bytes that LINES tokens prefetch their rows ahead.
    """

    @intrinsic(out=None)
    def tile(v: Lanes, x: Any, x_pitch: Any, w: Any, distance: Any, columns: Any, ahead: Any, out: Any) -> None:
        builder, groups = v.builder, v.builder.sdiv(columns, i64_const(2 * WIDTH))
        starts = [builder.add(x, builder.mul(x_pitch, i64_const(t))) for t in range(tokens)]
        lines = [builder.add(w, builder.mul(distance, i64_const(r))) for r in range(LINES)]
        sums = [[v.variable(0.0) for _ in lines] for _ in starts]
        with v.lane_groups(groups) as index:
            for line in lines if tokens == LINES else ():
                prefetch_line(builder, builder.add(builder.add(line, ahead), builder.mul(index, i64_const(4))))
            weights = [_unaligned(v, line, index) for line in lines]
            for start, totals in zip(starts, sums, strict=True):
                pairs = _unaligned(v, start, index)
                for total, weight in zip(totals, weights, strict=True):
                    builder.store(v.add_pairs(pairs, weight, builder.load(total)), total)
        for t, totals in enumerate(sums):
            whole = sum_each(builder, builder.fadd, [builder.load(total) for total in totals])
            for line in range(LINES):
                part = shuffled(builder, whole, whole, [line])
                pointer = builder.inttoptr(address_of(builder, out, t, line), part.type.as_pointer())
                builder.store(part, pointer).align = 4

    return tile


def _unaligned(v: Lanes, address: Any, index: Any) -> Any:
    value = v.load(address, index)
    value.align = 2
    return value


_tile_1, _tile_2, _tile_4 = _tile(1), _tile(2), _tile(LINES)


@kernel
def _per_head(first: Any, last: Any, sizes: Any, x: RowAddress, w: RowAddress, out: RowAddress) -> None:
    """Tasks first..last, each TASK_ROWS rows of a head; rows of x and out are (token, head), rows of w (head, n)."""
    tokens, n, k = sizes
    tasks, pitch, ahead = -(-n // TASK_ROWS), 2 * k, max(w.row_pitch, AHEAD)
    padded = padded_tokens(tokens)
    codes, sums = aligned_fp32(padded * k // 2), np.empty((padded, TASK_ROWS), np.float32)
    for element in range(tokens * k // 2, len(codes)):
        codes[element] = 0
    gathered = -1
    for task in range(first, last):
        start, target = codes.ctypes.data, sums.ctypes.data  # numba frees arrays that a loop does not name
        head, part = task // tasks, task_rows(task % tasks, n)
        if head != gathered:
            gathered = head
            for token in range(tokens):  # pairs of bf16 move like an fp32
                source = x.base + token * x.block_pitch + head * x.row_pitch
                load_row_as_fp32(source, k // 2, FP32, start + pitch * token, STEP)
        distance = part.distance * w.row_pitch
        for row in range(part.width):
            line = w.base + head * w.block_pitch + (part.first + row) * w.row_pitch
            for token in range(0, tokens, LINES):
                rows, left = start + pitch * token, tokens - token
                totals = TileSums(target + 4 * (TASK_ROWS * token + row), 4 * TASK_ROWS, 4 * part.width)
                if left == 1:
                    _tile_1(rows, pitch, line, distance, k, ahead, totals)
                elif left == 2:
                    _tile_2(rows, pitch, line, distance, k, ahead, totals)
                else:
                    _tile_4(rows, pitch, line, distance, k, ahead, totals)
        for token in range(tokens):
            for run in range(part.runs):
                source = target + 4 * (TASK_ROWS * token + WIDTH * run)
                row_of_out = out.base + token * out.block_pitch + head * out.row_pitch
                column = 2 * (part.first + part.distance * run)
                store_row_as(source, part.columns, out.kind, row_of_out + column)
