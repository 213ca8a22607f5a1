"""The loop of Sparse Flash Attention over a token's selected rows, tile by tile."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, int64

from glm5_kernels.compiled.fp32_product import accumulate, accumulate_pairs
from glm5_kernels.compiled.jit import inner, kernel
from glm5_kernels.compiled.rows import (
    ELEMENT_BYTES,
    PACKED,
    PAIRED,
    interleave,
    load_columns_as_fp32,
    load_row_as_fp32,
    prefetch,
    store_row_as,
    transpose,
)
from glm5_kernels.compiled.simd import BF16, FP32, STEP, WIDTH, in_steps
from glm5_kernels.compiled.sparse_flash_attention_intrinsics import exponentials, pair_up, scale_and_peak, unpacked
from glm5_kernels.compiled.sparse_flash_attention_operands import DEPTH, TILE, new_tile, part_of
from glm5_kernels.sparse_flash_attention import TILE as PER_SCALE

#: The kind as which rows of a cache kind are transposed: PACKED rows are unpacked to fp32 first, PAIRED rows move as
#: 32 bits.
_KEY_KIND = (FP32, BF16, FP32, FP32, FP32)
#: The kind as which they become values.
_VALUE_KIND = (FP32, BF16, FP32, FP32, BF16)
_VALUE_BYTES = (4, 2, 4, 4, 2)


@kernel
def attend_tokens(
    first: Any, last: Any, all_queries: Any, caches: Any, selection: Any, softmax: Any, groups: Any, out: Any, lse: Any
) -> None:
    """out (RowAddress of latents) and lse fp32 [T, heads] of tasks first..last, each some heads of a token.

    With the keys k_j = [ckv_j, kpe_j] of the chosen positions in tiles, for every head with query q:

        s_j   = scale * q . k_j                                    _scores
        m'    = max(m, max_j s_j),  p_j = exp(s_j - m')            _online_softmax
        l'    = l * exp(m - m') + sum_j p_j
        o'    = o * exp(m - m') + sum_j p_j * ckv_j                _weighted_values

    from m = -inf, l = 0, o = 0 on; after the last tile out = o / l and lse = m + log(l).
    """
    tile = new_tile(groups.heads, caches, selection.topk_indices.shape[1])
    for task in range(first, last):
        token, head, queries = part_of(task, all_queries, groups)
        if task + 1 < last and selection.request[(task + 1) // groups.per_token] != selection.request[token]:
            prefetch_rows(0, select_rows(token + 1, TILE, selection, caches, tile), caches, tile)  # in no cache yet
        count = select_rows(token, selection.topk_indices.shape[1], selection, caches, tile)
        _load_query(token, queries, caches, tile)
        for row in range(len(tile.mixed)):  # no slices: numba's shape checks take long to compile
            tile.peak[row], tile.total[row] = float32(-np.inf), float32(0)
            for column in range(caches.rank):
                tile.mixed[row, column] = float32(0)
        for start in range(0, count, TILE):
            keys = min(TILE, count - start)
            if caches.ckv.kind == PACKED:
                _unpack_rows(start, in_steps(keys), caches, tile)
            prefetch_rows(start + keys, min(start + 2 * TILE, count), caches, tile)
            _scores(start, keys, caches, tile)
            _online_softmax(keys, caches, softmax, tile)
            _weighted_values(start, keys, caches, softmax, tile)
        store_token(token, head, queries.heads, count, caches.rank, tile, out, lse)


@inner
def store_token(token: Any, first: Any, heads: Any, count: Any, rank: Any, tile: Any, out: Any, lse: Any) -> None:
    """Normalise and store the sums of a token's heads from `first` on, which read `count` rows, and the logarithms."""
    for row in range(heads):
        lse[token, first + row] = tile.peak[row] + np.log(tile.total[row]) if count else float32(np.inf)
        for column in range(rank):
            tile.mixed[row, column] = tile.mixed[row, column] / tile.total[row] if count else float32(0)
        target = out.base + token * out.block_pitch + (first + row) * out.row_pitch
        store_row_as(tile.mixed.ctypes.data + 4 * row * tile.mixed.shape[1], rank, out.kind, target)


@inner
def _columns_per_element(caches: Any) -> Any:
    return 2 if caches.ckv.kind == PAIRED else 1


@inner
def _value_pairs(caches: Any, softmax: Any) -> Any:
    """P V multiplies pairs only where P is rounded to bf16."""
    return caches.ckv.kind == PAIRED and softmax.round_probs != 0


@inner
def select_rows(token: Any, most: Any, selection: Any, caches: Any, tile: Any) -> Any:
    """tile.ckv_rows and kpe_rows <- the addresses of a token's first `most` selected rows; the number of rows.

    The last row is repeated up to a multiple of STEP: padding must be a row that was written.
    """
    topk_indices, visible = selection.topk_indices[token], selection.visible[token]
    blocks, count = selection.block_table[selection.request[token]], int64(0)
    for column in range(min(most, len(topk_indices), visible)):
        position = topk_indices[column]
        if position < 0:
            break  # the first negative entry ends the list
        index = position // caches.block_size
        if position < visible and index < len(blocks) and blocks[index] >= 0:
            block, offset = np.int64(blocks[index]), position - index * caches.block_size
            tile.ckv_rows[count] = caches.ckv.base + block * caches.ckv.block_pitch + offset * caches.ckv.row_pitch
            tile.kpe_rows[count] = caches.kpe.base + block * caches.kpe.block_pitch + offset * caches.kpe.row_pitch
            count += 1
    for key in range(count, in_steps(count)):
        tile.ckv_rows[key], tile.kpe_rows[key] = tile.ckv_rows[count - 1], tile.kpe_rows[count - 1]
    return count


@inner
def _load_query(token: Any, queries: Any, caches: Any, tile: Any) -> None:
    """tile.query <- both parts of every head's query, as fp32 or, for PAIRED caches, as pairs of bf16."""
    per, nope, pe = _columns_per_element(caches), queries.nope, queries.pe
    rank, rope = caches.rank // per, caches.rope // per
    nope_kind = FP32 if per == 2 else nope.kind  # pairs are moved as 32 bits
    pe_kind = FP32 if per == 2 else pe.kind
    for head in range(queries.heads):
        start = tile.query + 4 * head * (rank + rope)
        nope_row = nope.base + token * nope.block_pitch + head * nope.row_pitch
        load_row_as_fp32(nope_row, rank, nope_kind, start, STEP)
        pe_row = pe.base + token * pe.block_pitch + head * pe.row_pitch
        load_row_as_fp32(pe_row, rope, pe_kind, start + 4 * rank, STEP)


@inner
def _unpack_rows(start: Any, keys: Any, caches: Any, tile: Any) -> None:
    """tile.latents and tile.rotated <- packed rows start .. start + keys as fp32."""
    for key in range(keys):
        latents, rotated = tile.ckv_rows[start + key], tile.kpe_rows[start + key]
        scales = rotated + 2 * caches.rope  # an element of the rotated part is a bf16
        unpacked(latents, caches.rank // PER_SCALE, PER_SCALE, scales, FP32, tile.latent_rows[key])
        load_row_as_fp32(rotated, caches.rope, BF16, tile.rotated_rows[key], STEP)


@inner
def prefetch_rows(start: Any, stop: Any, caches: Any, tile: Any) -> None:
    size = ELEMENT_BYTES[caches.ckv.kind]
    for key in range(start, stop):
        prefetch(tile.ckv_rows[key], caches.rank * size)
        prefetch(tile.kpe_rows[key], caches.rope * size)


@inner
def _scores(start: Any, keys: Any, caches: Any, tile: Any) -> None:
    """tile.scores[:, :keys] <- query . key, not scaled, for the selected rows from `start` on.

    STEP keys and DEPTH columns at a time: transposed, they stay in the L1 cache for all heads. The columns of a key are
    added in order.
    """
    kind, per, heads, whole = caches.ckv.kind, _columns_per_element(caches), len(tile.peak), in_steps(keys)
    latent_dims, dims = caches.rank // per, (caches.rank + caches.rope) // per
    as_kind, size = _KEY_KIND[kind], ELEMENT_BYTES[_KEY_KIND[kind]]
    for head in range(heads):
        for key in range(whole):
            tile.scores[head, key] = float32(0)
    for key in range(0, whole, STEP):
        out, dim = tile.scores.ctypes.data + 4 * key, int64(0)
        while dim < dims:
            rows, skipped, depth = tile.ckv_rows.ctypes.data, dim, min(DEPTH, latent_dims - dim)
            if dim >= latent_dims:
                rows, skipped, depth = tile.kpe_rows.ctypes.data, dim - latent_dims, min(DEPTH, dims - dim)
            key_rows = rows + 8 * (start + key)
            if kind == PACKED:
                unpacked_rows = tile.rotated_rows.ctypes.data if dim >= latent_dims else tile.latent_rows.ctypes.data
                key_rows = unpacked_rows + 8 * key
            for lane in range(0, STEP, WIDTH):
                transpose(key_rows + 8 * lane, size * skipped, depth, as_kind, tile.keys + 4 * lane, STEP)
            left = tile.query + 4 * dim
            if kind == PAIRED:
                accumulate_pairs(tile.keys, STEP, left, dims, heads, depth, out, TILE)
            else:
                accumulate(tile.keys, STEP, left, dims, heads, depth, out, TILE)
            dim += depth


@inner
def _online_softmax(keys: Any, caches: Any, softmax: Any, tile: Any) -> None:
    """tile.scores <- unnormalised probabilities; the earlier sums are rescaled to the new maximum."""
    whole, pairs = in_steps(keys), _value_pairs(caches, softmax)
    for head in range(len(tile.scores)):
        row, before = tile.scores.ctypes.data + 4 * head * TILE, tile.peak[head]
        for key in range(keys, whole):  # padding gets no weight
            tile.scores[head, key] = float32(-np.inf)
        peak = max(before, scale_and_peak(row, whole // WIDTH, float32(softmax.scale)))
        added = exponentials(row, whole // WIDTH, peak, softmax.round_probs)
        factor = np.exp(before - peak)
        tile.total[head] = tile.total[head] * factor + added
        tile.peak[head] = peak
        if factor != float32(1):
            for column in range(caches.rank):
                tile.mixed[head, column] *= factor
        if pairs:
            pair_up(row, whole // 2)


@inner
def _weighted_values(start: Any, keys: Any, caches: Any, softmax: Any, tile: Any) -> None:
    """tile.mixed += probabilities times values, STEP columns of the rows at a time, which fit the L1 cache."""
    (heads, rank), whole, left = tile.mixed.shape, in_steps(keys), tile.scores.ctypes.data
    kind, pairs, rows = caches.ckv.kind, _value_pairs(caches, softmax), tile.ckv_rows.ctypes.data + 8 * start
    if kind == PACKED:
        rows = tile.latent_rows.ctypes.data
    size = _VALUE_BYTES[kind]
    for column in range(0, rank, STEP):
        out = tile.mixed.ctypes.data + 4 * column
        if pairs:
            for key in range(start, start + whole, 2):
                even, odd = tile.ckv_rows[key] + size * column, tile.ckv_rows[key + 1] + size * column
                interleave(even, odd, STEP, tile.values + 2 * STEP * (key - start), STEP)
            accumulate_pairs(tile.values, STEP, left, TILE, heads, whole // 2, out, rank)
        else:
            load_columns_as_fp32(rows, whole, size * column, _VALUE_KIND[kind], tile.values)
            accumulate(tile.values, STEP, left, TILE, heads, whole, out, rank)
