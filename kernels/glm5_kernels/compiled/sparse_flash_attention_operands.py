"""Operands and memory of the compiled Sparse Flash Attention, as numba takes them."""

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
#: Columns of the queries multiplied with a tile at a time: 128 columns of 32 keys are 16 KiB.
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


class SelectedKeys(NamedTuple):
    """topk_indices int32 [T, K], visible and request int64 [T] (`query_layout`), block_table int32 [B, max_blocks]."""

    topk_indices: Any
    visible: Any
    request: Any
    block_table: Any


class SoftmaxOptions(NamedTuple):
    """scale: of the scores. round_probs: 1 if probabilities are rounded to bf16 before they multiply the values."""

    scale: float
    round_probs: int


class Tile(NamedTuple):
    """Memory of a thread: one tile of keys, and the sums of a token so far; H is heads, a multiple of FEWER.

    Where the caches are PAIRED, two bf16 columns share the 32 bits of an element: D = (rank + rope) / 2, else
    D = rank + rope.

    A field that compiled code only passes on is an address (int): every array costs numba time to compile.

    Attributes:
        query: [H, D], zeros after the last head. keys: [DEPTH, STEP], transposed. values: [TILE, STEP], some columns.
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


class _ThreadTile(threading.local):
    """A thread's last tile, the sizes that it was made for, and the arrays whose addresses it holds."""

    sizes: tuple[Any, ...] | None = None
    arrays: tuple[Any, ...]
    tile: Any


_thread = _ThreadTile()


def thread_tile(new: Callable[..., tuple[tuple[Any, ...], Any]], heads: int, caches: Caches, most: int) -> Any:
    """This thread's tile for `heads` and up to `most` selected positions, made by `new` where the last one differs."""
    sizes = new, heads, caches.ckv.kind, caches.rank, caches.rope, most
    if _thread.sizes != sizes:
        _thread.arrays, _thread.tile = new(heads, caches, most)
        _thread.sizes = sizes
    return _thread.tile


def new_tile(heads: int, caches: Caches, most: int) -> tuple[tuple[Any, ...], Tile]:
    """The arrays whose addresses the tile holds, and the tile."""
    heads, rank, rope = -(-heads // FEWER) * FEWER, caches.rank, caches.rope
    dims = (rank + rope) // (2 if caches.ckv.kind == PAIRED else 1)
    query, latents, rotated = np.zeros((heads, dims), np.float32), aligned(TILE, rank), aligned(TILE, rope)
    keys, values = aligned(DEPTH * STEP), aligned(TILE * STEP)
    tile = Tile(
        query=query.ctypes.data,
        keys=keys.ctypes.data,
        values=values.ctypes.data,
        scores=aligned(heads, TILE),
        mixed=aligned(heads, rank),
        peak=np.empty(heads, np.float32),
        total=np.empty(heads, np.float32),
        ckv_rows=np.empty(most + STEP, np.int64),
        kpe_rows=np.empty(most + STEP, np.int64),
        latent_rows=latents.ctypes.data + 4 * rank * np.arange(TILE),
        rotated_rows=rotated.ctypes.data + 4 * rope * np.arange(TILE),
    )
    return (query, keys, values, latents, rotated), tile


def aligned(*shape: int) -> Any:
    return aligned_fp32(math.prod(shape)).reshape(shape)
