"""What the loop of Sparse Flash Attention works on, as numba takes it: addresses, buffers, sizes of a tile."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from glm5_kernels.compiled.rows import PAIRED, RowAddress
from glm5_kernels.compiled.simd import FEWER, STEP, aligned_fp32

#: Keys of a tile.
TILE = 64
#: Columns of the queries multiplied with a tile at a time: 128 of 32 keys are 16 KiB.
DEPTH = 128


class Queries(NamedTuple):
    """Queries of all tokens: rows (token, head) of both parts, and the heads of a token."""

    nope: RowAddress
    pe: RowAddress
    heads: int


class Caches(NamedTuple):
    """Rows (block, offset) of the latents and of the rotated keys, both of one kind of element.

    rank, rope: their columns, padded to whole lanes.
    """

    ckv: RowAddress
    kpe: RowAddress
    block_size: int
    rank: int
    rope: int


class ChosenKeys(NamedTuple):
    """topk_indices int32 [T, K], visible and request int64 [T] (`query_layout`), block_table int32 [B, max_blocks]."""

    topk_indices: Any
    visible: Any
    request: Any
    block_table: Any


class SoftmaxOptions(NamedTuple):
    """scale: of the scores. round_probs: 1 if probabilities are rounded to bf16 before they meet the values."""

    scale: float
    round_probs: int


class Tile(NamedTuple):
    """Buffers of a task: one tile of keys and what a token has summed so far; H is heads, a multiple of FEWER.

    Where the caches are PAIRED, two bf16 columns share the 32 bits of an element: D = (rank + rope) / 2, else
    D = rank + rope.

    What compiled code needs no elements of is an address: every array costs numba time to compile.

    Attributes:
        query: [H, D], zeros behind the last head. keys: [DEPTH, STEP], transposed. values: [TILE, STEP], some columns.
        scores: [H, TILE]. mixed: [H, rank], the weighted sum of values. peak, total: [H], of the softmax.
        ckv_rows, kpe_rows: int64 [K + STEP], addresses of the chosen rows.
        latent_rows, rotated_rows: int64 [TILE], addresses of unpacked rows [rank] and [rope].
    """

    query: int
    keys: int
    values: int
    scores: Any
    mixed: Any
    peak: Any
    total: Any
    ckv_rows: Any
    kpe_rows: Any
    latent_rows: Any
    rotated_rows: Any


class _Buffers(threading.local):
    """A thread's tile, for what sizes it is, and the arrays that it holds addresses of."""

    sizes: tuple[Any, ...] | None = None
    arrays: tuple[Any, ...]
    tile: Any


def buffers(make: Callable[..., tuple[tuple[Any, ...], Any]], heads: int, caches: Caches, most: int) -> Any:
    """This thread's tile, by `make`, for so many heads and up to `most` chosen positions; the last one if it fits."""
    sizes = make, heads, caches.ckv.kind, caches.rank, caches.rope, most
    if _own.sizes != sizes:
        _own.arrays, _own.tile = make(heads, caches, most)
        _own.sizes = sizes
    return _own.tile


def new_buffers(heads: int, caches: Caches, most: int) -> tuple[tuple[Any, ...], Tile]:
    """A tile, and the arrays that it holds addresses of."""
    heads, rank, rope = -(-heads // FEWER) * FEWER, caches.rank, caches.rope
    dims = (rank + rope) // (2 if caches.ckv.kind == PAIRED else 1)
    query, latents, rotated = np.zeros((heads, dims), np.float32), aligned(TILE, rank), aligned(TILE, rope)
    keys, values = aligned(DEPTH * STEP), aligned(TILE * STEP)
    tile = Tile(
        query.ctypes.data, keys.ctypes.data, values.ctypes.data,
        aligned(heads, TILE), aligned(heads, rank), np.empty(heads, np.float32), np.empty(heads, np.float32),
        np.empty(most + STEP, np.int64), np.empty(most + STEP, np.int64),
        latents.ctypes.data + 4 * rank * np.arange(TILE), rotated.ctypes.data + 4 * rope * np.arange(TILE),
    )  # fmt: skip
    return (query, keys, values, latents, rotated), tile


def aligned(*shape: int) -> Any:
    """`aligned_fp32`, outside of compiled code."""
    return aligned_fp32.py_func(math.prod(shape)).reshape(shape)


_own = _Buffers()
