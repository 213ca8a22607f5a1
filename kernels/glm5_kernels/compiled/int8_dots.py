"""int8 products for a few rows: the weight is read once, in the order it lies in memory.

A library's product packs the weight first, which pays for many rows only.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import int64
from numba.extending import register_jitable
from torch.nn.functional import linear

from glm5_kernels.compiled.int8_dots_intrinsics import ROWS as ROWS_OF_TILE
from glm5_kernels.compiled.int8_dots_intrinsics import STEP, TILE, dots, dots_ahead, dots_of_one
from glm5_kernels.compiled.int8_ways import CHOSEN, IN_BLOCKS
from glm5_kernels.compiled.jit import kernel
from glm5_kernels.compiled.threads import each

ROWS = 256  # weight rows of a task, whole tiles
#: Columns and tokens multiplied with all rows of a task before the next ones: they and the rows stay in the L2 cache.
_COLUMNS, _TOGETHER = 2048, 16
#: Columns whose products are summed in fp32 without an error: 2^24 / (128 * 128).
_EXACT = 1024
#: Whole numbers that fp32 holds, less than the error of a row's length. Tokens that are widened at a time.
_HELD, _WIDENED = 0.999 * 2**24, 2048
#: What a token's codes are held as, and which bit of theirs it has flipped: int8 + 128 is a byte without sign.
CODE = CHOSEN.code
FLIP = 128 if CODE is np.uint8 else 0
#: More tokens than this are multiplied as `CHOSEN.beyond` says; fp32 products first widen the weight.
TOKENS = CHOSEN.tokens


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
    out = torch.empty(len(x), len(w), dtype=torch.int32)

    def one(number: int) -> None:
        first, last = number * ROWS, min((number + 1) * ROWS, len(w))
        rows(x, w.data_ptr(), w.stride(0), first, last, out.numpy())

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


@kernel
def rows(x: Any, w: Any, pitch: Any, first: Any, last: Any, out: Any) -> None:
    """out int32 [tokens, N] <- x (CODE) [tokens, K] times weight rows first..last; tokens as `in_tiles` says.

    Rows that are no whole tile are multiplied one by one, each as a tile of ROWS_OF_TILE times the same row.
    """
    (tokens, k), width, spare = x.shape, out.shape[1], np.empty((TILE, ROWS_OF_TILE), np.int32)
    source, target, rest = int64(x.ctypes.data), int64(out.ctypes.data), int64(spare.ctypes.data)
    for token in range(tokens):
        for row in range(first, last):  # not as slices: their shape check takes numba 2 s to compile
            out[token, row] = 0
    groups = -(-tokens // _TOGETHER)
    for part in range(groups * -(-k // _COLUMNS)):
        column, begin = part // groups * _COLUMNS, part % groups * _TOGETHER
        steps, row = min(_COLUMNS, k - column) // STEP, first
        while row < last:
            whole = row + ROWS_OF_TILE <= last
            weight, between = w + row * pitch + column, pitch if whole else 0
            for token in range(begin, min(begin + _TOGETHER, tokens), TILE):
                here = source + token * x.strides[0] + column * x.itemsize
                place, apart = (target + 4 * (token * width + row), width) if whole else (rest, ROWS_OF_TILE)
                if not whole:
                    for i in range(TILE):
                        spare[i, 0] = 0
                if tokens == 1:
                    dots_of_one(here, x.strides[0], weight, between, steps, place, apart)
                elif token == 0:
                    dots_ahead(here, x.strides[0], weight, between, steps, place, apart)
                else:
                    dots(here, x.strides[0], weight, between, steps, place, apart)
                if not whole:
                    for i in range(min(TILE, tokens)):
                        out[token + i, row] += spare[i, 0]
            row += ROWS_OF_TILE if whole else 1
