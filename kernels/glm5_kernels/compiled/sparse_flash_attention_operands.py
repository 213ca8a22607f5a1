"""Operands and memory of the compiled Sparse Flash Attention, as numba takes them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import float32

from glm5_kernels.compiled.jit import inner
from glm5_kernels.compiled.rows import PACKED, PAIRED, RowAddress
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
    """Memory of some tasks: one tile of keys, and the sums of a token so far; H is heads, a multiple of FEWER.

    Where the caches are PAIRED, two bf16 columns share the 32 bits of an element: D = (rank + rope) / 2, else
    D = rank + rope.

    A field that compiled code only passes on is an address (int) in `memory`: every array costs numba time to compile.

    Attributes:
        query: [H, D], zeros after the last head. keys: [DEPTH, STEP], transposed. values: [TILE, STEP], some columns.
        scores: [H, TILE]. mixed: [H, rank], the weighted sum of values. peak, total: [H], of the softmax.
        ckv_rows, kpe_rows: int64 [K + STEP], addresses of the chosen rows.
        latent_rows, rotated_rows: int64 [TILE], addresses of unpacked rows [rank] and [rope].
    """

    memory: Any
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


class Groups(NamedTuple):
    """A task is a group of `heads` neighbouring heads (the last one may have fewer) of a token, `per_token` of them."""

    heads: int
    per_token: int


def groups_of(heads: int, tokens: int, threads: int, unit: int) -> Groups:
    """Groups of the heads, each of whole units, so that few tokens have a task for each of the threads."""
    parts = max(1, min(-(-threads // max(1, tokens)), heads // unit))
    size = -(-heads // (parts * unit)) * unit
    return Groups(size, -(-heads // size))


@inner
def part_of(task: Any, queries: Any, groups: Any) -> Any:
    """(token, its first head, Queries of the heads) of a task."""
    token, first = task // groups.per_token, task % groups.per_token * groups.heads
    nope, pe = queries.nope, queries.pe
    part = Queries(
        RowAddress(nope.base + first * nope.row_pitch, nope.block_pitch, nope.row_pitch, nope.kind),
        RowAddress(pe.base + first * pe.row_pitch, pe.block_pitch, pe.row_pitch, pe.kind),
        min(groups.heads, queries.heads - first),
    )
    return token, first, part


@inner
def new_tile(heads: Any, caches: Any, most: Any) -> Any:
    """A tile for `heads` heads and up to `most` selected positions."""
    heads, rank, rope = -(-heads // FEWER) * FEWER, caches.rank, caches.rope
    dims = (rank + rope) // (2 if caches.ckv.kind == PAIRED else 1)
    query, keys, values = heads * dims, DEPTH * STEP, TILE * STEP
    unpacked = TILE * (rank + rope) if caches.ckv.kind == PACKED else 0
    memory = aligned_fp32(query + keys + values + unpacked)
    for element in range(query):  # of heads after the last one
        memory[element] = float32(0)
    latent_rows, rotated_rows, start = np.empty(TILE, np.int64), np.empty(TILE, np.int64), memory.ctypes.data
    for key in range(TILE):
        latent_rows[key] = start + 4 * (query + keys + values + key * rank)
        rotated_rows[key] = start + 4 * (query + keys + values + TILE * rank + key * rope)
    return Tile(
        memory,
        start,
        start + 4 * query,
        start + 4 * (query + keys),
        aligned_fp32(heads * TILE).reshape((heads, TILE)),
        aligned_fp32(heads * rank).reshape((heads, rank)),
        np.empty(heads, np.float32),
        np.empty(heads, np.float32),
        np.empty(most + STEP, np.int64),
        np.empty(most + STEP, np.int64),
        latent_rows,
        rotated_rows,
    )
