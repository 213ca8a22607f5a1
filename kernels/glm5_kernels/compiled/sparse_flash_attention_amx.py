"""Sparse Flash Attention by AMX: a token's selected rows in tiles, scores and softmax with heads in columns.

The next tile's rows are not prefetched: on Sapphire Rapids that took a tenth longer, in decode and prefill.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import float32, int64

from glm5_kernels.compiled import amx
from glm5_kernels.compiled.amx import SIDE, TILE, LeftAt, OutAt, RightAt
from glm5_kernels.compiled.jit import inner, kernel
from glm5_kernels.compiled.rows import PACKED, load_row_as_fp32, transpose, turn
from glm5_kernels.compiled.simd import BF16, FP32, STEP, WIDTH, aligned_fp32
from glm5_kernels.compiled.sparse_flash_attention_intrinsics import copy_and_pair, softmax_columns, unpacked
from glm5_kernels.compiled.sparse_flash_attention_operands import part_of
from glm5_kernels.compiled.sparse_flash_attention_tiles import select_rows, store_token
from glm5_kernels.sparse_flash_attention import TILE as PER_SCALE

#: Keys of a tile: the more, the fewer times all sums are loaded and stored; what a tile needs fits an L2 cache.
KEYS = 128


class AmxTile(NamedTuple):
    """Memory of some tasks: one tile of keys, and the sums of a token so far.

    H heads in whole sides, R = rank, D = rank + rope. Fields that are only passed on are addresses in `memory`.

    Attributes:
        query: bf16 [H / 16, D / 2, 16, 2]. keys: bf16 [KEYS, D]. pairs: bf16 [KEYS / 2, R + 16, 2], two keys' columns.
        scores: fp32 [KEYS, H], then probabilities as pairs of bf16. probs: bf16 [H, 2, KEYS], the same transposed.
        unpacked: bf16 [2, R], of two packed rows. mixed: fp32 [H, R + 16]. peak, total, factor: fp32 [H].
        ckv_rows, kpe_rows: int64 [K + KEYS], addresses of the selected rows.
    """

    memory: Any
    query: int
    keys: int
    pairs: int
    scores: int
    probs: int
    unpacked: int
    mixed: Any
    peak: Any
    total: Any
    factor: Any
    ckv_rows: Any
    kpe_rows: Any


@inner
def new_amx_tile(heads: Any, caches: Any, most: Any) -> Any:
    """A tile for `heads` heads and up to `most` selected positions.

    Rows of `pairs` and `mixed` are longer than needed: a power of two apart they would share sets of a cache.
    """
    heads, rank, dims = -(-heads // SIDE) * SIDE, caches.rank, caches.rank + caches.rope
    query, keys, pairs = heads * dims // 2, KEYS * dims // 2, KEYS // 2 * (rank + WIDTH)
    memory = aligned_fp32(query + keys + pairs + 2 * KEYS * heads + rank)
    start = memory.ctypes.data
    return AmxTile(
        memory,
        start,
        start + 4 * query,
        start + 4 * (query + keys),
        start + 4 * (query + keys + pairs),
        start + 4 * (query + keys + pairs + KEYS * heads),
        start + 4 * (query + keys + pairs + 2 * KEYS * heads),
        aligned_fp32(heads * (rank + WIDTH)).reshape((heads, rank + WIDTH)),
        aligned_fp32(heads),
        aligned_fp32(heads),
        aligned_fp32(heads),
        np.empty(most + SIDE, np.int64),
        np.empty(most + SIDE, np.int64),
    )


@kernel
def attend_by_amx(
    first: Any, last: Any, all_queries: Any, caches: Any, selection: Any, softmax: Any, groups: Any, out: Any, lse: Any
) -> None:
    """`sparse_flash_attention_tiles.attend_tokens` for bf16 queries, bf16 or PACKED caches, rank and rope whole sides.

    The last head is repeated up to a whole side of heads.
    """
    amx.configure()
    tile = new_amx_tile(groups.heads, caches, selection.topk_indices.shape[1])
    for task in range(first, last):
        token, head, queries = part_of(task, all_queries, groups)
        count = select_rows(token, selection.topk_indices.shape[1], selection, caches, tile)
        _load_query(token, queries, caches, tile)
        for row in range(len(tile.peak)):
            tile.peak[row], tile.total[row] = float32(-np.inf), float32(0)
        for start in range(0, count, KEYS):
            keys = min(KEYS, count - start)
            _gather(start, keys, caches, tile)
            _scores(keys, caches, tile)
            _softmax(keys, softmax, tile)
            _weighted_values(start, keys, caches, softmax, tile)
        store_token(token, head, queries.heads, count, caches.rank, tile, out, lse)
    amx.release()


@inner
def _in_sides(keys: Any) -> Any:
    return -(-keys // SIDE) * SIDE


@inner
def _load_query(token: Any, queries: Any, caches: Any, tile: Any) -> None:
    rows, nope, pe, dims = np.empty(TILE, np.int64), queries.nope, queries.pe, caches.rank + caches.rope
    for first in range(0, len(tile.peak), TILE):
        target = tile.query + 2 * first * dims
        for lane in range(TILE):
            rows[lane] = nope.base + token * nope.block_pitch + min(first + lane, queries.heads - 1) * nope.row_pitch
        transpose(rows.ctypes.data, 0, caches.rank // 2, FP32, target, TILE)  # pairs move as 32 bits
        for lane in range(TILE):
            rows[lane] = pe.base + token * pe.block_pitch + min(first + lane, queries.heads - 1) * pe.row_pitch
        transpose(rows.ctypes.data, 0, caches.rope // 2, FP32, target + 2 * TILE * caches.rank, TILE)


@inner
def _gather(start: Any, keys: Any, caches: Any, tile: Any) -> None:
    """tile.keys and tile.pairs <- the selected rows from `start` on; the last one is repeated up to a whole side."""
    pitch, last = 2 * (caches.rank + caches.rope), start + keys - 1
    for key in range(0, _in_sides(keys), 2):
        even, odd, target = min(start + key, last), min(start + key + 1, last), tile.keys + pitch * key
        pairs = tile.pairs + 2 * (caches.rank + WIDTH) * key
        first, second = tile.ckv_rows[even], tile.ckv_rows[odd]
        if caches.ckv.kind == PACKED:
            first, second = tile.unpacked, tile.unpacked + 2 * caches.rank
            _unpack(even, caches, tile, first)
            _unpack(odd, caches, tile, second)
        copy_and_pair(first, second, caches.rank, target, pitch, pairs)
        for row in (even, odd):
            load_row_as_fp32(tile.kpe_rows[row], caches.rope // 2, FP32, target + 2 * caches.rank, STEP)
            target += pitch


@inner
def _unpack(row: Any, caches: Any, tile: Any, out: Any) -> None:
    """out bf16 [rank] <- the latents of a packed row; its scales follow the rotated part, which is bf16."""
    scales = tile.kpe_rows[row] + 2 * caches.rope
    unpacked(tile.ckv_rows[row], caches.rank // PER_SCALE, PER_SCALE, scales, BF16, out)


@inner
def _scores(keys: Any, caches: Any, tile: Any) -> None:
    """tile.scores [keys, heads] <- query . key, not scaled."""
    dims, heads = caches.rank + caches.rope, len(tile.peak)
    for key in range(0, _in_sides(keys), SIDE):
        for head in range(0, heads, SIDE):
            amx.multiply(
                LeftAt(tile.keys + 2 * dims * key, 2 * dims, 2 * dims * TILE, 1, 0),
                RightAt(tile.query + 2 * head * dims, 4 * TILE, 2 * TILE * dims, 4 * TILE * TILE),
                OutAt(tile.scores + 4 * (heads * key + head), 4 * heads, 4 * heads * TILE),
                dims // SIDE, 1,
            )  # fmt: skip


@inner
def _softmax(keys: Any, softmax: Any, tile: Any) -> None:
    """tile.probs <- unnormalised probabilities; updates peak, total and factor."""
    parts, pairs, heads = 1 if softmax.round_probs else 2, _in_sides(keys) // 2, len(tile.peak)
    for head in range(0, heads, TILE):
        scores, offset = tile.scores + 4 * head, 4 * head
        softmax_columns(
            scores, heads, keys, pairs, float32(softmax.scale), parts,
            tile.peak.ctypes.data + offset, tile.total.ctypes.data + offset, tile.factor.ctypes.data + offset,
        )  # fmt: skip
        for part in range(parts):
            out = tile.probs + 2 * KEYS * (2 * head + part)
            turn(scores + 4 * heads * part, 2 * heads, pairs // WIDTH, out, KEYS)


@inner
def _weighted_values(start: Any, keys: Any, caches: Any, softmax: Any, tile: Any) -> None:
    """tile.mixed += probabilities times values, after the earlier sum is rescaled to the new maximum."""
    rank, pitch, heads = caches.rank, 4 * (caches.rank + WIDTH), len(tile.peak)
    parts = 1 if softmax.round_probs else 2
    for head in range(heads if start else 0):
        if tile.factor[head] != float32(1):
            for column in range(rank):
                tile.mixed[head, column] *= tile.factor[head]
    for head in range(0, heads, SIDE):
        for column in range(0, rank, SIDE):
            amx.multiply(
                LeftAt(tile.probs + 4 * KEYS * head, 4 * KEYS, 4 * KEYS * TILE, parts, 2 * KEYS),
                RightAt(tile.pairs + 4 * column, pitch, 4 * TILE, TILE * pitch),
                OutAt(tile.mixed.ctypes.data + pitch * head + 4 * column, pitch, TILE * pitch),
                _in_sides(keys) // SIDE, int64(start == 0),
            )  # fmt: skip
