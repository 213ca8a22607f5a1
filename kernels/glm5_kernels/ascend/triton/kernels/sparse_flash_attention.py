"""Sparse Flash Attention as Triton kernels: rows gathered (and unpacked), scores, softmax, sums.

Shaped for one core of a 910B/910C (512 KB L1, 64 KB L0A and L0B, 128 KB L0C, 192 KB UB), at GLM-5's 512 + 64:

    gather_rows       BN = 64 rows of 1152 bytes (72 KB in UB, twice) by one copy per_program, then written by one copy.
    unpack_rows       the same from BN = 16 packed rows by three copies per_program: 8 KB int8, 32 KB fp32, 16 KB bf16.
    score_rows        BH = 64 heads against BN = 64 rows that follow each other, twice: [64, 576] x [576, 64].
    normalize_scores  4 heads of 2048 scores: 32 KB in fp32. A loop over heads: copies overlap with vectors.
    weigh_rows        64 heads, BR = 256 columns, BN = 256 rows at a time: [64, 256] x [256, 256], 64 KB of fp32 in L0C;
                      with a token for every cube core all columns, [64, 128] x [128, 512], 128 KB: weights once.

Each kernel keeps to one kind of core: scores, softmax and sums in one kernel wait for each other by way of global
memory once per tile (the cost is in benchmarks/README.md). Rows are gathered whole: an unused entry gets a row
that holds data before the kernels start, and the *scores* are masked. A mask on the gathered rows would pass a tile
through selects, and unwritten rows may hold NaN, which a probability of zero does not remove.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def score_rows(
    ql_nope, q_pe, ckv, kpe, count, scores, s_rows, step, tokens, per_program,
    H: tl.constexpr, R: tl.constexpr, P: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Grid (T / per_program, H / BH, K / step), step and K multiples of BN. ql_nope [T, H, R] and q_pe [T, H, P];
    ckv [T, K, R] and kpe [T, K, P], gathered; count int32 [T], entries to read; scores fp32 [T, H, K], not yet scaled.
    """
    group, block, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    r, p, i = tl.arange(0, R), tl.arange(0, P), tl.arange(0, BN)
    for t in range(group * per_program, tl.minimum((group + 1) * per_program, tokens)):
        head = t * H + block * BH + tl.arange(0, BH)
        latent_query = tl.load(ql_nope + head[:, None] * R + r[None, :])
        rotated_query = tl.load(q_pe + head[:, None] * P + p[None, :])
        for first in range(part * step, tl.minimum((part + 1) * step, tl.load(count + t)), 2 * BN):
            for start in tl.static_range(0, 2 * BN, BN):  # the second product overlaps with the first one's store
                index = t * s_rows + first + start + i
                latent = tl.load(ckv + index[:, None] * R + r[None, :])
                rotated = tl.load(kpe + index[:, None] * P + p[None, :])
                score = tl.dot(rotated_query, tl.trans(rotated), tl.dot(latent_query, tl.trans(latent)))
                tl.store(scores + head[:, None] * s_rows + (first + start + i)[None, :], score)


@triton.jit
def normalize_scores(
    scores, rows, count, weights, out, lse, scale, s_rows, per_program,
    H: tl.constexpr, R: tl.constexpr, BH: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Grid (T, H / BH / per_program). Softmax of scores [T, H, s_rows] over the used entries, in the dtype of weights
    [T, H, s_rows]; rows int32 [T, s_rows], -1 where an entry is unused; K >= s_rows. lse fp32 [T, H]. Without an entry
    out [T, H, R] is zero."""
    t, part = tl.program_id(0), tl.program_id(1)
    i, r = tl.arange(0, K), tl.arange(0, R)
    row = tl.load(rows + t * s_rows + i, mask=i < s_rows, other=-1)
    unused = tl.where(row >= 0, 0.0, -1.0e30)
    number = tl.load(count + t)
    for block in range(part * per_program, tl.minimum((part + 1) * per_program, H // BH)):
        head = t * H + block * BH + tl.arange(0, BH)
        index = head[:, None] * s_rows + i[None, :]
        if number == 0:
            tl.store(out + head[:, None] * R + r[None, :], tl.zeros([BH, R], out.dtype.element_ty))
        score = tl.load(scores + index, mask=(i < number)[None, :], other=-1.0e30)
        score = score * scale + unused[None, :]
        largest = tl.max(score, axis=1)
        weight = tl.exp(score - largest[:, None])
        total = tl.sum(weight, axis=1)
        nothing = largest < -1.0e29
        share = tl.where(nothing, 0.0, 1.0 / total)
        tl.store(weights + index, (weight * share[:, None]).to(weights.dtype.element_ty), mask=(i < s_rows)[None, :])
        tl.store(lse + head, tl.where(nothing, float("inf"), largest + tl.log(total)))


@triton.jit
def weigh_rows(
    weights, ckv, count, out, s_rows, tokens, per_program,
    H: tl.constexpr, R: tl.constexpr, BH: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Grid (T / per_program, H / BH, R / BR). out [T, H, R] = weights [T, H, K] times ckv [T, K, R]; K a
    multiple of BN. Without an entry it writes nothing."""
    group, block = tl.program_id(0), tl.program_id(1)
    i, r = tl.arange(0, BN), tl.program_id(2) * BR + tl.arange(0, BR)
    for t in range(group * per_program, tl.minimum((group + 1) * per_program, tokens)):
        head = t * H + block * BH + tl.arange(0, BH)
        number = tl.load(count + t)
        if number > 0:
            total = tl.zeros([BH, BR], tl.float32)
            for start in range(0, number, BN):
                weight = tl.load(weights + head[:, None] * s_rows + (start + i)[None, :])
                latent = tl.load(ckv + (t * s_rows + start + i)[:, None] * R + r[None, :])
                total = tl.dot(weight, latent, total)
            tl.store(out + head[:, None] * R + r[None, :], total.to(out.dtype.element_ty))


@triton.jit
def gather_rows(
    ckv_cache, kpe_cache, rows, ckv, kpe,
    s_ckv, s_kpe, s_rows, step,
    R: tl.constexpr, P: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Grid (T, K / step), step and K multiples of BN. Rows int32 [T, K] of ckv_cache and kpe_cache -> ckv [T * K, R]
    and kpe [T * K, P]."""
    t, part = tl.program_id(0), tl.program_id(1)
    i, r, p = tl.arange(0, BN), tl.arange(0, R), tl.arange(0, P)
    for start in range(part * step, tl.minimum((part + 1) * step, s_rows), BN):
        row = tl.load(rows + t * s_rows + start + i)  # as loaded: copies would wait for a vector instruction
        index = t * s_rows + start + i
        tl.store(ckv + index[:, None] * R + r[None, :], tl.load(ckv_cache + row[:, None] * s_ckv + r[None, :]))
        tl.store(kpe + index[:, None] * P + p[None, :], tl.load(kpe_cache + row[:, None] * s_kpe + p[None, :]))


@triton.jit
def unpack_rows(
    integers, rotated, scales, keep, rows, ckv, kpe,
    s_bytes, s_rows, step,
    R: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Grid (T, K / step), step and K multiples of BN. The three views of packed rows (int8 latents, bf16 rotated keys,
    bits of fp32 scales after as many other words; s_bytes between rows) -> ckv bf16 [T * K, R] = bf16(integer * scale
    of its TILE) and kpe bf16 [T * K, P]. keep int32 [R / TILE, 2 * R / TILE] selects a tile's scale by a
    product of integers: the other words need not be numbers."""
    t, part = tl.program_id(0), tl.program_id(1)
    TILES: tl.constexpr = R // TILE
    i, r, p, tile, q = tl.arange(0, BN), tl.arange(0, R), tl.arange(0, P), tl.arange(0, TILES), tl.arange(0, 2 * TILES)
    latent = tile[None, :, None] * TILE + tl.arange(0, TILE)[None, None, :]
    selector = tl.load(keep + tile[:, None] * (2 * TILES) + q[None, :])
    for start in range(part * step, tl.minimum((part + 1) * step, s_rows), BN):
        row = tl.load(rows + t * s_rows + start + i)
        index = t * s_rows + start + i
        bits = tl.load(scales + row[:, None] * (s_bytes // 4) + q[None, :])
        scale = tl.sum(bits[:, None, :] * selector[None, :, :], axis=2).to(tl.float32, bitcast=True)
        packed = tl.load(integers + row[:, None] * s_bytes + r[None, :]).to(tl.float32)
        unpacked = tl.reshape(packed, (BN, TILES, TILE)) * scale[:, :, None]
        tl.store(ckv + index[:, None, None] * R + latent, unpacked.to(tl.bfloat16))
        tl.store(kpe + index[:, None] * P + p[None, :], tl.load(rotated + row[:, None] * (s_bytes // 2) + p[None, :]))
