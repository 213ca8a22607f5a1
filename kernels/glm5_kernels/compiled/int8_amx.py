"""int8 products of many tokens by AMX, scaled back where they are made: no sum ever goes to memory.

The same numbers as `int8`'s plain versions, bit for bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numba import int64

from glm5_kernels.compiled import amx, int8_dots
from glm5_kernels.compiled.amx import AMX_INT8, SIDE, TILE, LeftAt, OutAt, RightAt
from glm5_kernels.compiled.int8_rows import FLOATS, scale_row
from glm5_kernels.compiled.jit import inner, kernel
from glm5_kernels.compiled.rows import ELEMENT_BYTES, load_row_as_fp32, prefetch, row_address, turn
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
    """Address of int8 [tokens, K]. factors: fp32 [tokens], what scales a token's sums back."""

    base: int
    tokens: int
    factors: Any


class Weight(NamedTuple):
    """n rows of k int8 from `base` on, `pitch` bytes apart; k a multiple of 64.

    scales: address of fp32 [n]. bias: int32 [n] or [].
    """

    base: int
    pitch: int
    n: int
    k: int
    scales: int
    bias: Any


class Places(NamedTuple):
    """Addresses of tokens' codes [T / 16, K / 4, 16, 4], int8 [32, _PART_PITCH] of the weight, and int32 [16, 32]."""

    packed: int
    part: int
    turned: int


def takes(weight: torch.Tensor, dtype: torch.dtype, there: bool = AMX_INT8) -> bool:
    """Whether `multiply` is the fast way for weight int8 [N, K] and results in `dtype`."""
    n, k = weight.shape
    whole = not n % SIDE and weight.stride(1) == 1 and (not k % _BYTES or int8_dots.has_room(weight))
    return there and dtype in FLOATS and whole


def multiply(
    codes: torch.Tensor, factors: torch.Tensor | None, weight: torch.Tensor, scale: torch.Tensor,
    dtype: torch.dtype, bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """(codes [T, K] times weight [N, K] transposed + bias) * factors * scale -> [T, N] in `dtype`, FP32 or BF16.

    Args:
        codes: int8. factors: fp32 [T, 1], or None for 1.
        weight: int8, rows in one piece, N a multiple of 32, K of 64 or with room behind the last row. scale: fp32 [N].
        bias: int32 [N].
    """
    tokens, n, threads = len(codes), len(weight), torch.get_num_threads()
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % _BYTES, 0, -tokens % SIDE)).contiguous()
    k = codes.shape[1]
    scale, out = scale.float().contiguous(), torch.empty(tokens, n, dtype=dtype)
    factors = torch.ones(tokens) if factors is None else factors.reshape(tokens)
    added = np.empty(0, np.int32) if bias is None else bias.contiguous().numpy()
    held = Weight(weight.data_ptr(), weight.stride(0), n, k, scale.data_ptr(), added)
    blocks = -(-tokens // _TOKENS)
    parts = 1 if threads == 1 else min(n // SIDE, -(-_SHARE * threads // max(blocks, 1)))
    given = Codes(codes.data_ptr(), tokens, factors.numpy())
    bound(_multiply, blocks * parts, 1, parts, given, held, row_address(out[None]))()
    return out


@kernel
def _multiply(first_task: Any, last_task: Any, parts: Any, codes: Any, weight: Any, out: Any) -> None:
    """Tasks first..last, each _TOKENS tokens and one of `parts` parts of the weight; rows of out are (0, token).

    What compiled code needs no elements of is an address: every array costs numba time to compile.
    """
    blocks, k, most = weight.n // SIDE, weight.k, min(_TOKENS, -(-codes.tokens // SIDE) * SIDE)
    packed, part = aligned_fp32(most * k // 4), aligned_fp32(SIDE * _PART_PITCH // 4)
    sums, turned = np.empty(SIDE * _SUMS_PITCH // 4, np.int32), aligned_fp32(TILE * SIDE)
    places = Places(packed.ctypes.data, part.ctypes.data, turned.ctypes.data)
    amx.configure()
    for task in range(first_task, last_task):
        first = task // parts * _TOKENS
        last = min(first + _TOKENS, codes.tokens)
        for token in range(first, last, TILE):
            for column in range(0, k, _BYTES):  # by fours; nobody reads the sums of tokens behind the last
                place = places.packed + k * (token - first) + TILE * column
                turn(codes.base + k * token + column, k // 4, 1, place, TILE)
        for block in range(task % parts * blocks // parts, (task % parts + 1) * blocks // parts):
            _start_from_bias(weight.bias, SIDE * block, sums)
            for column in range(0, k, _COLUMNS):
                _multiply_part(weight, SIDE * block, column, last - first, places, sums.ctypes.data)
            _scale_back(codes.factors, weight, SIDE * block, first, last, sums.ctypes.data, places.turned, out)
    amx.release()
    packed[0] = part[0] = turned[0] = 0  # numba frees an array after the last look at it


@inner
def _start_from_bias(bias: Any, row: Any, sums: Any) -> None:
    """sums [32, _SUMS_PITCH / 4] <- the bias of each row."""
    for element in range(SIDE * _SUMS_PITCH // 4 if len(bias) else 0):
        sums[element] = bias[row + element // (_SUMS_PITCH // 4)]


@inner
def _multiply_part(weight: Any, row: Any, column: Any, tokens: Any, places: Any, sums: Any) -> None:
    """sums int32 [32, tokens] += columns column .. column + _COLUMNS of 32 weight rows times those of tokens.

    They begin at 0 unless there is a bias. Between the products the next part is asked for, a few rows at a time.
    """
    k, width = weight.k, min(_COLUMNS, weight.k - column)
    start, fresh = weight.base + weight.pitch * row, int64(column == 0 and len(weight.bias) == 0)
    for r in range(SIDE):
        load_row_as_fp32(start + weight.pitch * r + column, width // 4, FP32, places.part + _PART_PITCH * r, STEP)
    ahead = start + (column + width if column + width < k else weight.pitch * SIDE)
    few = -(-SIDE * SIDE // tokens)
    for token in range(0, tokens, SIDE):
        asked = few * token // SIDE
        for r in range(asked, min(asked + few, SIDE)):
            prefetch(ahead + weight.pitch * r, _COLUMNS)
        amx.multiply_integers(
            LeftAt(places.part, _PART_PITCH, TILE * _PART_PITCH, 1, 0),
            RightAt(places.packed + k * token + TILE * column, _BYTES, TILE * k, TILE * _BYTES),
            OutAt(sums + 4 * token, _SUMS_PITCH, TILE * _SUMS_PITCH), width // _BYTES, fresh,
        )  # fmt: skip


@inner
def _scale_back(
    factors: Any, weight: Any, row: Any, first: Any, last: Any, sums: Any, turned: Any, out: Any
) -> None:  # fmt: skip
    """out[first:last, row : row + 32] <- sums, by token."""
    size, scales = ELEMENT_BYTES[out.kind], weight.scales + 4 * row
    for begin in range(first, last, TILE):
        turn(sums + 4 * (begin - first), _SUMS_PITCH // 4, SIDE // TILE, turned, SIDE)
        for token in range(begin, min(begin + TILE, last)):
            target = out.base + token * out.row_pitch + size * row
            scale_row(turned + 4 * SIDE * (token - begin), SIDE, factors[token], scales, out.kind, target)
