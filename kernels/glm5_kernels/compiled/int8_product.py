"""The integer product of up to some hundred tokens: the weight is read in the order in which it lies in memory.

A library packs the weight first, which pays off for many tokens only.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba.extending import register_jitable
from numpy.typing import NDArray

from glm5_kernels.compiled.amx import AMX_INT8
from glm5_kernels.compiled.int8_backends import (
    BACKEND,
    INT8_ZERO,
    STEP,
    Matrix,
    packed_tile_1,
    packed_tile_2,
    packed_tile_4,
    tile_1,
    tile_2,
    tile_4,
)
from glm5_kernels.compiled.jit import kernel
from glm5_kernels.compiled.recording import repeated
from glm5_kernels.compiled.simd import aligned_fp32
from glm5_kernels.compiled.task_rows import AHEAD, LINES, TASK_ROWS, TileSums, padded_tokens
from glm5_kernels.compiled.threads import LEAST_BYTES, run_ranges
from glm5_kernels.int8 import int8_matmul

#: Larger batches are multiplied by AMX, by a library or in pieces.
MAX_TOKENS = 16 if AMX_INT8 else 256
#: Tokens that are multiplied at a time: they and a task's rows stay cached.
_TOKEN_BLOCK = 16


@register_jitable  # type: ignore[untyped-decorator]
def rows_of(array: NDArray[Any]) -> Matrix:
    """Address of row 0 of an array [rows, columns], and bytes between rows; something else must hold the array."""
    return Matrix(array.ctypes.data, array.strides[0])


@kernel
def multiply_rows(
    x: Matrix, size: tuple[int, int], w: Matrix, packed: bool, lines: int, distance: int, out: Matrix
) -> None:
    """out = x times LINES groups of weight rows transposed; weights count as w + z (`int8_backends`).

    Nothing is an array: to count references to it takes numba longer than a tile.

    Args:
        x: int8 rows, in whole tiles. size: the number of rows that count, and K, a multiple of STEP.
        w: the first group: `lines` lines of K int8, or of pairs of INT4. distance: bytes to the next group.
        out: int32 [tokens, weight rows], the groups one after the other.
    """
    tokens, k = size
    steps, pairs, ahead = k // STEP, 2 if packed else 1, max(w.pitch, AHEAD)
    for block in range(0, tokens, _TOKEN_BLOCK):
        for line in range(lines):
            weights = Matrix(w.base + w.pitch * line, distance)
            for token in range(block, min(block + _TOKEN_BLOCK, tokens), LINES):
                codes, left = Matrix(x.base + x.pitch * token, x.pitch), tokens - token
                sums = TileSums(out.base + out.pitch * token + 4 * pairs * line, out.pitch, 4 * pairs * lines)
                if packed:
                    if left == 1:
                        packed_tile_1(codes, weights, sums, steps, ahead)
                    elif left == 2:
                        packed_tile_2(codes, weights, sums, steps, ahead)
                    else:
                        packed_tile_4(codes, weights, sums, steps, ahead)
                elif left == 1:
                    tile_1(codes, weights, sums, steps, ahead)
                elif left == 2:
                    tile_2(codes, weights, sums, steps, ahead)
                else:
                    tile_4(codes, weights, sums, steps, ahead)


@kernel
def _multiply_tasks(
    first: int, last: int, x: NDArray[np.int8], tokens: int, w: Matrix, n: int, out: NDArray[np.int32]
) -> None:
    """Tasks first..last of x[:tokens] times n weight rows, a multiple of LINES."""
    for row in range(first * TASK_ROWS, min(last * TASK_ROWS, n), TASK_ROWS):
        lines = min(TASK_ROWS, n - row) // LINES
        weights, sums = Matrix(w.base + w.pitch * row, w.pitch), Matrix(out.ctypes.data + 4 * row, out.strides[0])
        multiply_rows(rows_of(x), (tokens, x.shape[1]), weights, False, lines, w.pitch * lines, sums)


@register_jitable  # type: ignore[untyped-decorator]
def empty_codes(tokens: int, k: int) -> NDArray[np.int8]:
    """Uninitialised int8 [tokens, k], 64-byte aligned, k a multiple of 4."""
    codes: NDArray[np.int8] = aligned_fp32(tokens * k // 4).view(np.int8).reshape(tokens, k)
    return codes


def padded_columns(columns: int) -> int:
    """Columns in whole steps."""
    return -(-columns // STEP) * STEP


def has_padding(weight: torch.Tensor) -> bool:
    """True if the storage has whole steps of columns of the last row, too; what is read too much meets zero codes."""
    pairs = zip(weight.shape[:-1], weight.stride()[:-1], strict=True)
    last_row = weight.storage_offset() + sum((size - 1) * stride for size, stride in pairs)
    return last_row + padded_columns(weight.shape[-1]) <= weight.untyped_storage().nbytes()


@repeated
def matmul(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """int8 [T, K] times int8 [N, K] transposed -> int32 [T, N], exact."""
    (tokens, k), n = a.shape, len(w)
    if not a.numel():
        return torch.zeros(tokens, n, dtype=torch.int32)
    if k % STEP or n % LINES or w.stride(1) != 1 or (tokens > MAX_TOKENS and BACKEND.library):
        return torch._int_mm(a, w.t()) if BACKEND.library else int8_matmul(a, w)
    if tokens > MAX_TOKENS:
        return torch.cat([matmul(part, w) for part in a.split(MAX_TOKENS)])
    x = empty_codes(padded_tokens(tokens), k)
    x[:tokens], x[tokens:] = a.numpy(), 0
    out = np.empty((len(x), n), np.int32)
    weight = Matrix(w.data_ptr(), w.stride(0))
    run_ranges(_multiply_tasks, -(-n // TASK_ROWS), LEAST_BYTES // (TASK_ROWS * k), x, tokens, weight, n, out)
    out -= INT8_ZERO * x.sum(1, np.int32)[:, None]
    return torch.from_numpy(out)[:tokens]
