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
    TILE,
    Matrix,
    packed_tile_product,
    packed_token_product,
    tile_product,
    token_product,
)
from glm5_kernels.compiled.jit import kernel
from glm5_kernels.compiled.recording import repeated
from glm5_kernels.compiled.simd import WIDTH, aligned_fp32
from glm5_kernels.compiled.threads import LEAST_BYTES, run_ranges
from glm5_kernels.int8 import int8_matmul

#: Weight rows that several tokens are multiplied by at a time, and those of a task. One token takes WIDTH rows of each
#: quarter of a matrix: a thread reads four distant places of memory at once faster than one, because the processor's
#: prefetcher stops at the end of a page of 4 KiB.
ROWS, TASK_ROWS = 32, 64
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
    x: Matrix, size: tuple[int, int], w: Matrix, packed: bool, first: int, last: int, out: Matrix
) -> None:
    """out[:, first:last] += x times weight rows first..last transposed; weights count as w + z (`int8_backends`).

    Nothing is an array: to count references to it takes numba longer than a tile.

    Args:
        x: int8 rows. size: their number, whole tiles, and K, a multiple of STEP.
        w: rows of K int8, or of pairs of INT4. first: a multiple of TILE.
        out: int32 [tokens, columns], written up to the next multiple of TILE behind `last`.
    """
    tokens, k = size
    steps, lines = k // STEP, TILE // 2 if packed else TILE  # rows in memory that hold TILE weight rows
    for block in range(0, tokens, _TOKEN_BLOCK):
        for row in range(first, last, TILE):
            weights = Matrix(w.base + w.pitch * (row * lines // TILE), w.pitch)
            next_weights = Matrix(weights.base + w.pitch * lines, w.pitch)
            for token in range(block, min(block + _TOKEN_BLOCK, tokens), TILE):
                codes = Matrix(x.base + x.pitch * token, x.pitch)
                sums = Matrix(out.base + out.pitch * token + 4 * row, out.pitch)
                if packed:
                    packed_tile_product(codes, weights, sums, next_weights, last - row, steps)
                else:
                    tile_product(codes, weights, sums, next_weights, last - row, steps)


@kernel
def multiply_token(x: Matrix, k: int, w: Matrix, packed: bool, distance: int, out: Matrix) -> None:
    """out int32 [TILE, WIDTH] += one token times WIDTH weight rows from w on, and from each `distance` bytes behind."""
    steps, pairs = k // STEP, 2 if packed else 1
    for line in range(WIDTH // pairs):
        weights = Matrix(w.base + w.pitch * line, distance)
        sums = Matrix(out.base + 4 * pairs * line, out.pitch)
        if packed:
            packed_token_product(x, weights, sums, weights, TILE, steps)
        else:
            token_product(x, weights, sums, weights, TILE, steps)


@kernel
def _multiply_tasks(first: int, last: int, x: NDArray[np.int8], w: Matrix, n: int, out: NDArray[np.int32]) -> None:
    """Tasks first..last of `multiply_rows`, each ROWS of n weight rows."""
    multiply_rows(rows_of(x), x.shape, w, False, first * ROWS, min(last * ROWS, n), rows_of(out))


@register_jitable  # type: ignore[untyped-decorator]
def empty_codes(tokens: int, k: int) -> NDArray[np.int8]:
    """Uninitialised int8 [tokens, k], 64-byte aligned, k a multiple of 4."""
    codes: NDArray[np.int8] = aligned_fp32(tokens * k // 4).view(np.int8).reshape(tokens, k)
    return codes


@register_jitable  # type: ignore[untyped-decorator]
def padded_tokens(tokens: int) -> int:
    """Tokens in whole tiles."""
    return -(-tokens // TILE) * TILE


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
    if k % STEP or w.stride(1) != 1 or (tokens > MAX_TOKENS and BACKEND.library):
        return torch._int_mm(a, w.t()) if BACKEND.library else int8_matmul(a, w)
    if tokens > MAX_TOKENS:
        return torch.cat([matmul(part, w) for part in a.split(MAX_TOKENS)])
    x = empty_codes(padded_tokens(tokens), k)
    x[:tokens], x[tokens:] = a.numpy(), 0
    out = np.empty((len(x), -(-n // TILE) * TILE), np.int32)
    out[:] = -INT8_ZERO * x.sum(1, np.int32)[:, None]
    weight = Matrix(w.data_ptr(), w.stride(0))
    run_ranges(_multiply_tasks, -(-n // ROWS), LEAST_BYTES // (ROWS * k), x, weight, n, out)
    return torch.from_numpy(out)[:tokens, :n]
