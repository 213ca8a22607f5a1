"""The int8 product of few tokens: the weight is read once, in the order in which it lies in memory.

A library packs the weight first, which pays off for many tokens only.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import int64
from numba.extending import register_jitable
from numpy.typing import NDArray

from glm5_kernels.compiled.int8_backends import BACKEND, STEP, TILE, Matrix, tile_product, token_product
from glm5_kernels.compiled.jit import kernel
from glm5_kernels.compiled.simd import aligned_fp32
from glm5_kernels.compiled.threads import run_tasks
from glm5_kernels.int8 import int8_matmul

MAX_TOKENS = BACKEND.max_tokens
CODE = BACKEND.code
_CODE_BYTES = np.dtype(CODE).itemsize
#: Added to int8 codes; as a flip of the top bit, because int8 + 128 is the same byte with that bit flipped.
ZERO_POINT = 128 if CODE is np.uint8 else 0
ROWS = 256  # weight rows of a task
#: Of more than 16 tokens, so many tokens and columns are multiplied at a time: they and a task's rows stay cached.
_TOKEN_BLOCK, _COLUMN_BLOCK = 16, 2048


@kernel
def multiply_rows(x: NDArray[np.generic], w: Matrix, first: int, last: int, out: NDArray[np.int32]) -> None:
    """out[:, first:last] = x times weight rows first..last transposed.

    Args:
        x: `CODE` [tokens, K], K a multiple of STEP; one token or whole tiles (`padded_tokens`).
        w: int8 rows of K columns.
        out: int32 [tokens, columns], written up to the next multiple of TILE behind `last`.
    """
    tokens, k = x.shape
    column_block = k if tokens <= _TOKEN_BLOCK else _COLUMN_BLOCK
    for column in range(0, k, column_block):
        steps = min(column_block, k - column) // STEP
        for block in range(0, tokens, _TOKEN_BLOCK):
            for row in range(first, last, TILE):
                weights = Matrix(w.base + w.pitch * row + column, w.pitch)
                for token in range(block, min(block + _TOKEN_BLOCK, tokens), TILE):
                    codes = Matrix(x.ctypes.data + x.strides[0] * token + x.itemsize * column, x.strides[0])
                    sums = Matrix(out.ctypes.data + out.strides[0] * token + 4 * row, out.strides[0])
                    # Each tile of tokens prefetches its share of the next TILE weight rows.
                    share = TILE * w.pitch // max(tokens // TILE, 1)
                    next_weights = Matrix(weights.base + TILE * w.pitch + share * (token // TILE), share // TILE)
                    if tokens == 1:
                        token_product(codes, weights, sums, next_weights, last - row, steps, int64(column > 0))
                    else:
                        tile_product(codes, weights, sums, next_weights, last - row, steps, int64(column > 0))


@register_jitable  # type: ignore[untyped-decorator]
def empty_codes(tokens: int, k: int) -> NDArray[np.generic]:
    """Uninitialised `CODE` [tokens, k], 64-byte aligned."""
    codes: NDArray[np.generic] = aligned_fp32(tokens * k * _CODE_BYTES // 4).view(CODE).reshape(tokens, k)
    return codes


@register_jitable  # type: ignore[untyped-decorator]
def padded_tokens(tokens: int) -> int:
    """Rows of `multiply_rows`'s x for so many tokens."""
    return tokens if tokens == 1 else -(-tokens // TILE) * TILE


def padded_columns(columns: int) -> int:
    """Columns in whole steps."""
    return -(-columns // STEP) * STEP


def has_padding(weight: torch.Tensor) -> bool:
    """True if the storage has whole steps of columns of the last row, too; what is read too much meets zero codes."""
    pairs = zip(weight.shape[:-1], weight.stride()[:-1], strict=True)
    last_row = weight.storage_offset() + sum((size - 1) * stride for size, stride in pairs)
    return last_row + padded_columns(weight.shape[-1]) <= weight.untyped_storage().nbytes()


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
    x[tokens:] = 0
    x[:tokens] = a.numpy().view(np.uint8) ^ np.uint8(ZERO_POINT) if ZERO_POINT else a.numpy()
    out = np.empty((len(x), -(-n // TILE) * TILE), np.int32)
    weight = Matrix(w.data_ptr(), w.stride(0))
    run_tasks(lambda task: multiply_rows(x, weight, task * ROWS, min((task + 1) * ROWS, n), out), -(-n // ROWS))
    return torch.from_numpy(out)[:tokens, :n]
