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
from glm5_kernels.compiled.threads import LEAST_BYTES, run_ranges

#: Tokens and weight rows of a tile; weight rows of a task, of one token in quarters of the matrix (`int8_product`).
_TILE, _ROWS = 4, 64
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
    tasks = heads * -(-n // _ROWS)
    size = LEAST_BYTES // (2 * k * _ROWS)
    run_ranges(_per_head, tasks, size, (tokens, n, k), row_address(x), row_address(w), row_address(out))
    return out


def _tile(tokens: int, rows: int) -> Any:
    """The intrinsic out fp32 [tokens, rows] <- tokens times rows of `columns` bf16; pitches in bytes.

    Several tokens also request the rows that come next.
    """

    @intrinsic()
    def tile(v: Lanes, x: Any, x_pitch: Any, w: Any, w_pitch: Any, columns: Any, out: Any, out_pitch: Any) -> None:
        builder, groups = v.builder, v.builder.sdiv(columns, i64_const(2 * WIDTH))
        starts = [builder.add(x, builder.mul(x_pitch, i64_const(t))) for t in range(tokens)]
        lines = [builder.add(w, builder.mul(w_pitch, i64_const(r))) for r in range(rows)]
        sums = [[v.variable(0.0) for _ in range(rows)] for _ in range(tokens)]
        with v.lane_groups(groups) as index:
            for line in lines if tokens > 1 else ():
                ahead = builder.add(line, builder.mul(w_pitch, i64_const(rows)))
                prefetch_line(builder, builder.add(ahead, builder.mul(index, i64_const(4))))
            weights = [_unaligned(v, line, index) for line in lines]
            for start, totals in zip(starts, sums, strict=True):
                pairs = _unaligned(v, start, index)
                for total, weight in zip(totals, weights, strict=True):
                    builder.store(v.add_pairs(pairs, weight, builder.load(total)), total)
        for t, totals in enumerate(sums):
            whole = sum_each(builder, builder.fadd, [builder.load(total) for total in totals])
            parts = [shuffled(builder, whole, whole, [row]) for row in range(rows)] if tokens == 1 else [whole]
            for row, part in enumerate(parts, t):
                address = builder.add(out, builder.mul(out_pitch, i64_const(row)))
                builder.store(part, builder.inttoptr(address, part.type.as_pointer())).align = 4

    return tile


def _unaligned(v: Lanes, address: Any, index: Any) -> Any:
    value = v.load(address, index)
    value.align = 2
    return value


_one_token, _tile_of_tokens = _tile(1, _TILE), _tile(_TILE, _TILE)


@kernel
def _per_head(first: Any, last: Any, sizes: Any, x: RowAddress, w: RowAddress, out: RowAddress) -> None:
    """Tasks first..last, each _ROWS rows of a head; rows of x and out are (token, head), rows of w (head, n)."""
    tokens, n, k = sizes
    tasks = -(-n // _ROWS)
    padded = -(-tokens // _TILE) * _TILE
    codes, sums = aligned_fp32(padded * k // 2), np.empty((padded, _ROWS), np.float32)
    pitch = 2 * k
    for element in range(tokens * k // 2, len(codes)):
        codes[element] = 0
    quarter, quarter_sums = n // _ROWS * WIDTH, np.empty((_TILE, WIDTH), np.float32)
    gathered = -1
    for task in range(first, last):
        head, task_of_head = task // tasks, task % tasks
        if head != gathered:
            gathered = head
            for token in range(tokens):  # pairs of bf16 move like an fp32
                source = x.base + token * x.block_pitch + head * x.row_pitch
                load_row_as_fp32(source, k // 2, FP32, codes.ctypes.data + pitch * token, STEP)
        if tokens == 1 and task_of_head * WIDTH < quarter:
            low, distance = task_of_head * WIDTH, quarter * w.row_pitch
            for row in range(WIDTH):
                line = w.base + head * w.block_pitch + (low + row) * w.row_pitch
                target = quarter_sums.ctypes.data + 4 * row
                _one_token(codes.ctypes.data, pitch, line, distance, k, target, 4 * WIDTH)
            for part in range(_TILE):
                columns = out.base + head * out.row_pitch + 2 * (low + part * quarter)
                store_row_as(quarter_sums[part].ctypes.data, WIDTH, out.kind, columns)
            continue
        low, high = task_of_head * _ROWS, min((task_of_head + 1) * _ROWS, n)
        for row in range(low, high, _TILE):
            line = w.base + head * w.block_pitch + row * w.row_pitch
            for token in range(0, padded, _TILE):
                start, target = codes.ctypes.data + pitch * token, sums[token].ctypes.data + 4 * (row - low)
                _tile_of_tokens(start, pitch, line, w.row_pitch, k, target, 4 * _ROWS)
        for token in range(tokens):
            row_of_out = out.base + token * out.block_pitch + head * out.row_pitch + 2 * low
            store_row_as(sums[token].ctypes.data, high - low, out.kind, row_of_out)
