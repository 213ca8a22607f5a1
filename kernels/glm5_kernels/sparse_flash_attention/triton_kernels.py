"""Sparse Flash Attention as Triton kernels: the gathering (and unpacking) of rows, and attention over them.

Shaped for one core of a 910B/910C (512 KB L1, 64 KB L0A and L0B, 128 KB L0C, 192 KB UB), at GLM-5's 512 + 64:

    gather_rows  BN = 64 rows of 1152 bytes (72 KB in UB) by one copy each, then written in a row by one copy: all 48
                 vector cores keep many copies under way.
    attend       BH = 32 heads against BN = 128 rows that follow each other: one copy of them to L1 (144 KB, twice),
                 [32, 512] x [512, 128] and [32, 128] x [128, 512], 80 KB of fp32 in L0C. In UB of either vector core
                 the running output (32 KB fp32) beside a new product (32 KB). 64 heads of 8 tokens are 16 programs.
    unpack_rows  the same from packed rows, one tile of 128 latents at a time: 8 KB int8, 32 KB fp32, 16 KB bf16.

If `attend` gathered by itself, its rows would come between two products, while the cube waits (the cost is in
benchmarks/README.md). Rows are gathered whole: an unused place gets a row that holds data, and the
*scores* are masked. A mask on the gathered rows would take a tile through selects, and rows that nobody wrote may hold
NaN, which not even a probability of zero removes.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attend(
    ql_nope, q_pe, ckv, kpe, rows, count, out, lse, scale,
    s_rows,
    H: tl.constexpr, R: tl.constexpr, P: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Grid (T, H / BH). ql_nope [T, H, R] and q_pe [T, H, P]; ckv [T, K, R] and kpe [T, K, P], gathered; rows int32
    [T, K], -1 where a place is unused, K a multiple of BN; count int32 [T], how many places to look at."""
    t, block = tl.program_id(0), tl.program_id(1)
    head, i = t * H + block * BH + tl.arange(0, BH), tl.arange(0, BN)
    r, p = tl.arange(0, R), tl.arange(0, P)
    latent_query = tl.load(ql_nope + head[:, None] * R + r[None, :])
    rotated_query = tl.load(q_pe + head[:, None] * P + p[None, :])
    largest = tl.full([BH], -1.0e30, tl.float32)
    total = tl.zeros([BH], tl.float32)
    result = tl.zeros([BH, R], tl.float32)
    for start in range(0, tl.load(count + t), BN):
        used = tl.load(rows + t * s_rows + start + i) >= 0
        place = t * s_rows + start + i
        latent = tl.load(ckv + place[:, None] * R + r[None, :])
        rotated = tl.load(kpe + place[:, None] * P + p[None, :])
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
def gather_rows(
    ckv_cache, kpe_cache, rows, fill, ckv, kpe,
    s_ckv, s_kpe, s_rows,
    R: tl.constexpr, P: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Grid (T, K / BN). Rows int32 [T, K] of ckv_cache and kpe_cache -> ckv [T * K, R] and kpe [T * K, P]; an unused
    place (-1) gets the row `fill` int32 [T]."""
    t, block = tl.program_id(0), tl.program_id(1)
    i, r, p = tl.arange(0, BN), tl.arange(0, R), tl.arange(0, P)
    row = tl.load(rows + t * s_rows + block * BN + i)
    row = tl.where(row >= 0, row, tl.load(fill + t))
    place = t * s_rows + block * BN + i
    tl.store(ckv + place[:, None] * R + r[None, :], tl.load(ckv_cache + row[:, None] * s_ckv + r[None, :]))
    tl.store(kpe + place[:, None] * P + p[None, :], tl.load(kpe_cache + row[:, None] * s_kpe + p[None, :]))


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
