"""int8 products of many tokens by AMX, scaled back where they are made: no sum ever goes to memory.

The same numbers as `int8`'s plain versions, bit for bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numba import int64

from glm5_kernels.compiled import amx
from glm5_kernels.compiled.amx import AMX_INT8, SIDE, TILE, LeftAt, OutAt, RightAt
from glm5_kernels.compiled.int8_rows import FLOATS, scale_row
from glm5_kernels.compiled.jit import inner, kernel
from glm5_kernels.compiled.rows import (
    ELEMENT_BYTES,
    load_row_as_fp32,
    prefetch,
    row_address,
    transpose,
    turn,
)
from glm5_kernels.compiled.simd import FP32, STEP, aligned_fp32
from glm5_kernels.compiled.threads import bound

#: Bytes of a tile's row, and columns of a product's step.
_BYTES = 4 * TILE
#: Tokens that share the weights that were read, and columns of a part: a part of 32 weight rows stays in the nearest
#: cache for all of the tokens, whose codes stay in the next one.
_TOKENS, _COLUMNS = 256, 512
#: In bytes, from one row to the next: of a part, and of sums. A power of two apart they would share places of a cache.
_PART_PITCH, _SUMS_PITCH = _COLUMNS + _BYTES, 4 * _TOKENS + _BYTES
#: Tasks for each thread, where there are several.
_SHARE = 2


class Codes(NamedTuple):
    """values: int8 [T, K]. factors: fp32 [T], what scales each token's sums back."""

    values: Any
    factors: Any


class Weight(NamedTuple):
    """n rows of k int8 from `base` on, `pitch` bytes apart. scales: fp32 [n]. bias: int32 [n] or []."""

    base: int
    pitch: int
    n: int
    k: int
    scales: Any
    bias: Any


def takes(weight: torch.Tensor, dtype: torch.dtype, there: bool = AMX_INT8) -> bool:
    """Whether `multiply` is the fast way for weight int8 [N, K] and results in `dtype`."""
    n, k = weight.shape
    return there and dtype in FLOATS and not n % SIDE and not k % _BYTES and weight.stride(1) == 1


def multiply(
    codes: torch.Tensor, factors: torch.Tensor | None, weight: torch.Tensor, scale: torch.Tensor,
    dtype: torch.dtype, bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """(codes [T, K] times weight [N, K] transposed + bias) * factors * scale -> [T, N] in `dtype`, FP32 or BF16.

    Args:
        codes: int8. factors: fp32 [T, 1], or None for 1.
        weight: int8, rows in one piece, N a multiple of 32, K of 64. scale: fp32 [N]. bias: int32 [N].
    """
    (tokens, k), n, threads = codes.shape, len(weight), torch.get_num_threads()
    out = torch.empty(tokens, n, dtype=dtype)
    given = Codes(
        codes.contiguous().numpy(), (torch.ones(tokens) if factors is None else factors.reshape(tokens)).numpy()
    )
    added = np.empty(0, np.int32) if bias is None else bias.contiguous().numpy()
    held = Weight(weight.data_ptr(), weight.stride(0), n, k, scale.float().contiguous().numpy(), added)
    blocks = -(-tokens // _TOKENS)
    parts = 1 if threads == 1 else min(n // SIDE, -(-_SHARE * threads // max(blocks, 1)))
    bound(_multiply, blocks * parts, 1, parts, given, held, row_address(out[None]))()
    return out


@kernel
def _multiply(first_task: Any, last_task: Any, parts: Any, codes: Any, weight: Any, out: Any) -> None:
    """Tasks first..last, each _TOKENS tokens and one of `parts` parts of the weight; rows of out are (0, token)."""
    (all_tokens, k), blocks = codes.values.shape, weight.n // SIDE
    packed = aligned_fp32(min(_TOKENS, -(-all_tokens // SIDE) * SIDE) * k // 4)
    part, sums = aligned_fp32(SIDE * _PART_PITCH // 4), aligned_fp32(SIDE * _SUMS_PITCH // 4)
    amx.configure()
    for task in range(first_task, last_task):
        first = task // parts * _TOKENS
        last = min(first + _TOKENS, all_tokens)
        _pack(codes.values, first, last, packed)
        for block in range(task % parts * blocks // parts, (task % parts + 1) * blocks // parts):
            for column in range(0, k, _COLUMNS):
                _multiply_part(weight, SIDE * block, column, last - first, packed, part, sums)
            _scale_back(codes.factors, weight, SIDE * block, first, last, sums, out)
    amx.release()


@inner
def _pack(values: Any, first: Any, last: Any, packed: Any) -> None:
    """packed [T / 16, K / 4, 16, 4] <- tokens first..last, the last one again up to a whole side."""
    rows, k = np.empty(TILE, np.int64), values.shape[1]
    for token in range(0, -(-(last - first) // SIDE) * SIDE, TILE):
        for lane in range(TILE):
            rows[lane] = values.ctypes.data + k * min(first + token + lane, last - 1)
        transpose(rows.ctypes.data, 0, k // 4, FP32, packed.ctypes.data + k * token, TILE)  # fours move as 32 bits


@inner
def _multiply_part(weight: Any, row: Any, column: Any, tokens: Any, packed: Any, part: Any, sums: Any) -> None:
    """sums int32 [32, tokens] <- or += columns column .. column + _COLUMNS of 32 weight rows times those of tokens.

    Between the products the next part is asked for, a few rows at a time.
    """
    k, width = weight.k, min(_COLUMNS, weight.k - column)
    start = weight.base + weight.pitch * row
    for r in range(SIDE):
        source = start + weight.pitch * r + column
        load_row_as_fp32(source, width // 4, FP32, part.ctypes.data + _PART_PITCH * r, STEP)
    ahead = start + (column + width if column + width < k else weight.pitch * SIDE)
    few, asked = -(-SIDE * SIDE // tokens), int64(0)
    for token in range(0, tokens, SIDE):
        for r in range(asked, min(asked + few, SIDE)):
            prefetch(ahead + weight.pitch * r, _COLUMNS)
        asked += few
        amx.multiply_integers(
            LeftAt(part.ctypes.data, _PART_PITCH, TILE * _PART_PITCH, 1, 0),
            RightAt(packed.ctypes.data + k * token + TILE * column, _BYTES, TILE * k, TILE * _BYTES),
            OutAt(sums.ctypes.data + 4 * token, _SUMS_PITCH, TILE * _SUMS_PITCH),
            width // _BYTES, int64(column == 0),
        )  # fmt: skip


@inner
def _scale_back(factors: Any, weight: Any, row: Any, first: Any, last: Any, sums: Any, out: Any) -> None:
    """out[first:last, row : row + 32] <- sums, by token."""
    turned = np.empty((TILE, SIDE), np.int32)
    for begin in range(first, last, TILE):
        turn(sums.ctypes.data + 4 * (begin - first), _SUMS_PITCH // 4, SIDE // TILE, turned.ctypes.data, SIDE)
        for token in range(begin, min(begin + TILE, last)):
            if len(weight.bias):
                for column in range(SIDE):
                    turned[token - begin, column] += weight.bias[row + column]
            target = out.base + token * out.row_pitch + ELEMENT_BYTES[out.kind] * row
            source, scales = turned[token - begin].ctypes.data, weight.scales.ctypes.data + 4 * row
            scale_row(source, SIDE, factors[token], scales, out.kind, target)
