"""The buffers that Sparse Flash Attention by AMX works in."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from glm5_kernels.compiled.amx import SIDE
from glm5_kernels.compiled.simd import WIDTH
from glm5_kernels.compiled.sparse_flash_attention_operands import Caches, aligned

#: Keys of a tile: the more, the fewer times all sums are loaded and stored; what a tile needs fits an L2 cache.
KEYS = 128


class AmxTile(NamedTuple):
    """One tile of keys and what a token has summed so far; H heads in whole sides, R = rank, D = rank + rope.

    What compiled code needs no elements of is an address: every array costs numba time to compile.

    Attributes:
        query: bf16 [H / 16, D / 2, 16, 2]. keys: bf16 [KEYS, D]. pairs: bf16 [KEYS / 2, R + 16, 2], two keys' columns.
        scores: fp32 [KEYS, H], then probabilities as pairs of bf16. turned: bf16 [H, 2, KEYS], the same by head.
        unpacked: bf16 [2, R], of two packed rows. mixed: fp32 [H, R + 16]. peak, total, factor: fp32 [H].
        ckv_rows, kpe_rows: int64 [K + KEYS], addresses of the chosen rows.
    """

    query: int
    keys: int
    pairs: int
    scores: int
    turned: int
    unpacked: int
    mixed: Any
    peak: Any
    total: Any
    factor: Any
    ckv_rows: Any
    kpe_rows: Any


def new_amx_buffers(heads: int, caches: Caches, most: int) -> tuple[tuple[Any, ...], AmxTile]:
    """A tile, and the arrays that it holds addresses of.

    Rows of `pairs` and `mixed` are longer than they need be: a power of two apart they would share places of a cache.
    """
    heads, rank, dims = -(-heads // SIDE) * SIDE, caches.rank, caches.rank + caches.rope
    sizes = (heads * dims // 2, KEYS * dims // 2, KEYS // 2 * (rank + WIDTH), KEYS * heads, heads * KEYS, rank)
    held = tuple(aligned(size) for size in sizes)
    peak, total, factor = (aligned(heads) for _ in range(3))
    ckv_rows, kpe_rows = (np.empty(most + SIDE, np.int64) for _ in range(2))
    query, keys, pairs, scores, turned, unpacked = (room.ctypes.data for room in held)
    mixed = aligned(heads, rank + WIDTH)
    return held, AmxTile(
        query, keys, pairs, scores, turned, unpacked, mixed, peak, total, factor, ckv_rows, kpe_rows
    )  # fmt: skip
