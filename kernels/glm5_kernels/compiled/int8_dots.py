"""int8 products for a few rows: the weight is read once, in the order it lies in memory.

A library's product packs the weight first, which pays for many rows only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numba.extending import register_jitable
from torch.nn.functional import linear

from glm5_kernels.compiled.int4_dots_intrinsics import HAS_INT4, beyond_int4, dots_of_int4, dots_of_one_int4, narrow
from glm5_kernels.compiled.int8_dots_intrinsics import STEP, TILE, dots, dots_of_one
from glm5_kernels.compiled.int8_ways import CHOSEN, IN_BLOCKS
from glm5_kernels.compiled.jit import kernel
from glm5_kernels.compiled.threads import each

ROWS = 256  # weight rows of a task
#: More than so many tokens are multiplied so many at a time, by so many columns: a cache holds them and a task's rows.
_TOGETHER, _COLUMNS = 16, 2048
#: Columns whose products are summed in fp32 without an error: 2^24 / (128 * 128).
_EXACT = 1024
#: Whole numbers that fp32 holds, less than the error of a row's length. Tokens that are widened at a time.
_HELD, _WIDENED = 0.999 * 2**24, 2048
#: What a token's codes are held as, and which bit of theirs it has flipped: int8 + 128 is a byte without sign.
CODE = CHOSEN.code
FLIP = 128 if CODE is np.uint8 else 0
#: More tokens than this are multiplied as `CHOSEN.beyond` says; fp32 products first widen the weight.
TOKENS = CHOSEN.tokens


def in_steps(columns: int) -> int:
    return -(-columns // STEP) * STEP


def has_room(weight: torch.Tensor) -> bool:
    """Whether whole steps of columns can be read of its last row, too: what is read too much meets tokens of zero."""
    pairs = zip(weight.shape[:-1], weight.stride()[:-1], strict=True)
    last = weight.storage_offset() + sum((size - 1) * stride for size, stride in pairs)
    return last + in_steps(weight.shape[-1]) <= weight.untyped_storage().nbytes()


def matmul(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """int8 [T, K] times int8 [N, K] transposed -> int32 [T, N], exact."""
    tokens, k = a.shape
    if not a.numel():
        return torch.zeros(tokens, len(w), dtype=torch.int32)
    if (tokens > TOKENS and CHOSEN.beyond != IN_BLOCKS) or k % STEP or w.stride(1) != 1:
        return torch._int_mm(a, w.t()) if CHOSEN.library else by_fp32(a, w)
    if tokens > TOKENS:
        return torch.cat([matmul(a[first : first + TOKENS], w) for first in range(0, tokens, TOKENS)])
    x = np.zeros((in_tiles(tokens), k), CODE)
    x[:tokens] = a.numpy() if not FLIP else a.numpy().view(np.uint8) ^ np.uint8(FLIP)
    given, out = as_tokens(x), torch.empty(len(x), len(w), dtype=torch.int32)

    def one(number: int) -> None:
        first, last = number * ROWS, min((number + 1) * ROWS, len(w))
        rows(given, w.data_ptr(), w.stride(0), first, last, out.numpy())

    each(one, -(-len(w) // ROWS))
    return out[:tokens]


def by_fp32(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The same by fp32 products, of as many columns as fp32 can hold every sum of: partial sums are whole numbers."""
    out, y = torch.empty(len(a), len(w), dtype=torch.int32), w.float()
    longest = _longest(y)
    for first in range(0, len(a), _WIDENED):
        x = a[first : first + _WIDENED].float()
        # No sum of products of two rows is larger than their lengths' product, whichever are added first.
        columns = a.shape[1] if _longest(x) * longest < _HELD else _EXACT
        parts = [slice(begin, begin + columns) for begin in range(0, a.shape[1], columns)]
        rows_of_out = out[first : first + _WIDENED]
        rows_of_out.copy_(linear(x[:, parts[0]], y[:, parts[0]]))
        for part in parts[1:]:
            rows_of_out += linear(x[:, part], y[:, part]).int()
    return out


def _longest(rows_of: torch.Tensor) -> float:
    """The largest Euclidean length of a row."""
    return float(torch.linalg.vector_norm(rows_of, dim=1).max())


@register_jitable  # type: ignore[untyped-decorator]
def in_tiles(tokens: int) -> int:
    """Tokens that `rows` wants for so many: one alone, or whole tiles."""
    return tokens if tokens == 1 else -(-tokens // TILE) * TILE


class Tokens(NamedTuple):
    """codes CODE [tokens, K], tokens as `in_tiles` says. Where 4 bits have an instruction: narrow int8, the same, and
    sums int32 [K / `_columns`, tokens] of them; else both are empty."""

    codes: Any
    narrow: Any
    sums: Any


@register_jitable  # type: ignore[untyped-decorator]
def _columns(tokens: int, k: int) -> int:
    """Columns that are multiplied before the next ones: all, or what a cache holds of many tokens."""
    return k if tokens <= _TOGETHER else _COLUMNS


@kernel
def as_tokens(codes: Any) -> Any:
    """`Tokens` of CODE [tokens, K]."""
    tokens, k = codes.shape
    if not HAS_INT4:
        return Tokens(codes, np.empty((0, 0), np.int8), np.empty((0, 0), np.int32))
    columns = _columns(tokens, k)
    narrowed, sums = np.empty((tokens, k), np.int8), np.empty((-(-k // columns), tokens), np.int32)
    for token in range(tokens):
        for part in range(len(sums)):
            first = token * k + part * columns
            count = min(columns, k - part * columns)
            sums[part, token] = narrow(codes.ctypes.data + 2 * first, count, narrowed.ctypes.data + first)
    return Tokens(codes, narrowed, sums)


@kernel
def rows(given: Any, w: Any, pitch: Any, first: Any, last: Any, out: Any) -> None:
    """out int32 [tokens, N] <- given (`Tokens`) times weight rows first..last."""
    x = given.codes
    (tokens, k), pitch_in, pitch_out = x.shape, x.strides[0], out.shape[1]
    addresses, tile = np.empty(TILE, np.int64), np.empty((TILE, TILE), np.int32)
    table, stride = addresses.ctypes.data, STEP * TILE // max(tokens, TILE)
    columns = _columns(tokens, k)
    groups = -(-tokens // _TOGETHER)
    int4 = HAS_INT4 and beyond_int4(w + pitch * first) == 0  # until a code has more bits
    for part in range(groups * -(-k // columns)):
        column, begin = part // groups * columns, part % groups * _TOGETHER
        steps = min(columns, k - column) // STEP
        for row in range(first, last, TILE):
            for r in range(TILE):
                addresses[r] = w + pitch * min(row + r, last - 1) + column
            ahead, whole = w + pitch * (row + TILE), row + TILE <= last and steps * STEP == k
            for token in range(begin, min(begin + _TOGETHER, tokens), TILE):
                # By the third tile of few tokens all of the next rows are on their way.
                reach = stride if token < 2 * TILE and groups == 1 else 0
                source = x.ctypes.data + token * pitch_in + column * x.itemsize
                place = out.ctypes.data + 4 * (token * pitch_out + row) if whole else tile.ctypes.data
                width = pitch_out if whole else TILE
                if int4:
                    narrowed = given.narrow.ctypes.data + token * k + column
                    sums = given.sums.ctypes.data + 4 * (column // columns * tokens + token)
                    if tokens == 1:
                        int4 = dots_of_one_int4(narrowed, k, table, steps, place, width, ahead, reach, sums) == 0
                    else:
                        int4 = dots_of_int4(narrowed, k, table, steps, place, width, ahead, reach, sums) == 0
                if not int4:
                    if tokens == 1:
                        dots_of_one(source, pitch_in, table, steps, place, width, ahead, reach)
                    else:
                        dots(source, pitch_in, table, steps, place, width, ahead, reach)
                if not whole:
                    for i in range(min(TILE, tokens)):  # not as slices: their shape check takes numba 2 s to compile
                        for j in range(min(TILE, last - row)):
                            before = out[token + i, row + j] if column else 0
                            out[token + i, row + j] = before + tile[i, j]
                ahead += TILE * reach * steps
