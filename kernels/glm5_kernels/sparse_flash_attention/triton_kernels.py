"""Sparse Flash Attention as Triton kernels: attention over gathered rows, and the unpacking of int8 rows.

Shaped for one core of a 910B/910C (512 KB L1, 64 KB L0A and L0B, 128 KB L0C, 192 KB UB), at GLM-5's 512 + 64:

    attend       BH = 16 heads against BN = 64 rows. In L1 the queries (18 KB) and the gathered rows (72 KB), which fit
                 several times; [16, 512] x [512, 64] and [16, 64] x [64, 512]: 64 KB of rows in L0B, 32 KB of fp32 in
                 L0C. In UB the running output (32 KB fp32) beside a new product (32 KB). 64 heads of 8 tokens are 32
                 programs for 24 cores.
    unpack_rows  BN = 64 packed rows, one tile of 128 latents at a time: 8 KB int8, 32 KB fp32, 16 KB bf16 in UB.

Rows are gathered whole, by one copy each: an unused place gets the address of a row that holds data, and the *scores*
are masked. A mask on the gathered rows would take the whole tile through the vector cores on its way to the cube, and
rows that nobody wrote may hold NaN, which not even a probability of zero removes.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attend(
    ql_nope, q_pe, ckv, kpe, rows, fill, count, out, lse, scale,
    s_ckv, s_kpe, s_rows,
    H: tl.constexpr, R: tl.constexpr, P: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Grid (T, H / BH). ql_nope [T, H, R] and q_pe [T, H, P] contiguous; ckv, kpe by rows; rows int32 [T, K], -1
    unused, K a multiple of BN; fill int32 [T], a row that is used; count int32 [T], how many places to look at."""
    t, block = tl.program_id(0), tl.program_id(1)
    head, i = t * H + block * BH + tl.arange(0, BH), tl.arange(0, BN)
    r, p = tl.arange(0, R), tl.arange(0, P)
    latent_query = tl.load(ql_nope + head[:, None] * R + r[None, :])
    rotated_query = tl.load(q_pe + head[:, None] * P + p[None, :])
    safe = tl.load(fill + t)
    largest = tl.full([BH], -1.0e30, tl.float32)
    total = tl.zeros([BH], tl.float32)
    result = tl.zeros([BH, R], tl.float32)
    for start in range(0, tl.load(count + t), BN):
        row = tl.load(rows + t * s_rows + start + i)
        used = row >= 0
        row = tl.where(used, row, safe)
        latent = tl.load(ckv + row[:, None] * s_ckv + r[None, :])
        rotated = tl.load(kpe + row[:, None] * s_kpe + p[None, :])
        score = (tl.dot(latent_query, tl.trans(latent)) + tl.dot(rotated_query, tl.trans(rotated))) * scale
        score = tl.where(used[None, :], score, -1.0e30)
        new = tl.maximum(largest, tl.max(score, axis=1))
        weight = tl.where(used[None, :], tl.exp(score - new[:, None]), 0.0)
        shrink = tl.exp(largest - new)
        total = total * shrink + tl.sum(weight, axis=1)
        result = result * shrink[:, None] + tl.dot(weight.to(latent.dtype), latent)
        largest = new
    divisor = tl.where(total > 0, total, 1.0)
    result = tl.where((total > 0)[:, None], result / divisor[:, None], 0.0)
    tl.store(out + head[:, None] * R + r[None, :], result.to(out.dtype.element_ty))
    tl.store(lse + head, tl.where(total > 0, largest + tl.log(divisor), float("inf")))


@triton.jit
def unpack_rows(
    integers, rotated, scales, rows, fill, ckv, kpe,
    s_bytes, s_rows,
    R: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Grid (T, K / BN). The three views of packed rows (int8 latents, bf16 rotated keys, fp32 scales; s_bytes between
    rows) -> ckv bf16 [T * K, R] = bf16(integer * scale of its TILE) and kpe bf16 [T * K, P]; places unused get `fill`.
    """
    t, block = tl.program_id(0), tl.program_id(1)
    i, d, p = tl.arange(0, BN), tl.arange(0, TILE), tl.arange(0, P)
    row = tl.load(rows + t * s_rows + block * BN + i)
    row = tl.where(row >= 0, row, tl.load(fill + t))
    place = t * s_rows + block * BN + i
    for tile in tl.static_range(R // TILE):
        packed = tl.load(integers + row[:, None] * s_bytes + (tile * TILE + d)[None, :]).to(tl.float32)
        scale = tl.load(scales + row * (s_bytes // 4) + tile)
        tl.store(ckv + place[:, None] * R + (tile * TILE + d)[None, :], (packed * scale[:, None]).to(tl.bfloat16))
    tl.store(kpe + place[:, None] * P + p[None, :], tl.load(rotated + row[:, None] * (s_bytes // 2) + p[None, :]))
