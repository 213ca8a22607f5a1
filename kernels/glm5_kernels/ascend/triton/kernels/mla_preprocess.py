"""MLA preprocess as Triton kernels; the numbers are those of the op's steps (package docstring).

Shaped for one core of a 910B/910C (512 KB L1, 64 KB L0A and L0B, 128 KB L0C, 192 KB UB), at GLM-5's sizes:

    quantize_rows   steps 1, 5 and 6: a row of 6144 or 2048, TILE = 2048 (8 KB fp32) at a time; a row stays in L2
                    between its passes.
    linear          steps 2, 3, 7 and 8: BM = 16 tokens against BN = 64 rows, BK = 512 of the sum: 8 KB and 32 KB int8,
                    4 KB int32 in L0C. 64 divides both 2624 and 16384; at 16384 rows that are 256 programs for 24 cores.
                    More tokens: 128 against 128 rows, or 64 of 2624: twice 64 KB int8 in L1, 64 KB in L0C.
    absorb          step 9: BM = 16 tokens of one head, [16, 64] x [64, 512] three times: 64 KB in L0B, 32 KB in L0C;
                    of more tokens 64, 128 KB in L0C.
    rotate          step 10: a token's heads, 64 x 32 pairs (8 KB fp32 each half).
    write_latents   steps 11, 12 and 13: one token.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _round(x):
    """To the nearest integer, ties to even, of |x| < 2^22: what is added pushes the fraction out of the float."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def quantize_rows(
    x, gamma, scale_in, offset_in, normed, integers, scales, eps,
    s_x, n,
    NORM: tl.constexpr, MODE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (T). x [T, n] (s_x between rows). NORM: first RMSNorm with gamma [n], written to normed [T, n]. MODE:
    no_quant stops there; per_token_quant_symm writes integers int8 [T, n] and scales fp32 [T]; per_tensor_quant_asymm
    takes its one scale and offset from scale_in and offset_in."""
    t = tl.program_id(0)
    i = tl.arange(0, TILE)
    factor = 1.0
    if NORM:
        squares = 0.0
        for start in range(0, n, TILE):
            v = tl.load(x + t * s_x + start + i, mask=start + i < n, other=0.0).to(tl.float32)
            squares += tl.sum(v * v, axis=0)
        factor = tl.rsqrt(squares / n + eps)
    largest = 1e-8
    if NORM or MODE == "per_token_quant_symm":
        for start in range(0, n, TILE):
            inside = start + i < n
            v = tl.load(x + t * s_x + start + i, mask=inside, other=0.0).to(tl.float32)
            if NORM:
                v = v * factor * tl.load(gamma + start + i, mask=inside, other=0.0).to(tl.float32)
                tl.store(normed + t * n + start + i, v.to(normed.dtype.element_ty), mask=inside)
            largest = tl.maximum(largest, tl.max(tl.abs(v), axis=0))
    if MODE != "no_quant":
        if MODE == "per_token_quant_symm":
            scale = largest / 127.0
            offset = 0.0
            tl.store(scales + t, scale)
        else:
            scale = tl.load(scale_in).to(tl.float32)
            offset = tl.load(offset_in).to(tl.float32)
        for start in range(0, n, TILE):
            inside = start + i < n
            v = tl.load(x + t * s_x + start + i, mask=inside, other=0.0).to(tl.float32)
            if NORM:
                v = v * factor * tl.load(gamma + start + i, mask=inside, other=0.0).to(tl.float32)
            v = tl.minimum(tl.maximum(v / scale + offset, -128.0), 127.0)
            tl.store(integers + t * n + start + i, _round(v).to(tl.int8), mask=inside)


@triton.jit
def linear(
    x, w, x_scale, scale, bias, out,
    tokens, n, k, s_x, s_out,
    MODE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Grid (T / BM, N / BN). out [T, N] = x [T, K] times w [N, K] transposed; K a multiple of BK, N of BN; rows of x
    up to a whole BM are read and their results dropped. int8: exact,
    plus bias int32 [N] (per_tensor_quant_asymm), times x_scale [T] (per_token_quant_symm), times scale [N]."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    column, j = tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, BK)
    if MODE == "no_quant":
        total = tl.zeros([BM, BN], tl.float32)
    else:
        total = tl.zeros([BM, BN], tl.int32)
    for start in range(0, k, BK):
        a = tl.load(x + m[:, None] * s_x + (start + j)[None, :])
        b = tl.load(w + column[:, None] * k + (start + j)[None, :])
        total = tl.dot(a, tl.trans(b), total, out_dtype=total.dtype)
    if MODE == "per_tensor_quant_asymm":
        total = total + tl.load(bias + column)[None, :]
    y = total.to(tl.float32)
    if MODE == "per_token_quant_symm":
        y = y * tl.load(x_scale + m, mask=m < tokens, other=0.0)[:, None]
    if MODE != "no_quant":
        y = y * tl.load(scale + column)[None, :]
    tl.store(out + m[:, None] * s_out + column[None, :], y.to(out.dtype.element_ty), mask=(m < tokens)[:, None])


@triton.jit
def absorb(
    z, w_uk_t, out,
    tokens, s_z,
    H: tl.constexpr, N: tl.constexpr, HEAD: tl.constexpr, R: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Grid (T / BM, H). out [T, H, R] = the first N of each head of z [T, H * HEAD], times w_uk_t [H, N, R]; rows
    of z up to a whole BM are read."""
    m, h = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1)
    j, r = tl.arange(0, BK), tl.arange(0, R)
    total = tl.zeros([BM, R], tl.float32)
    for start in range(0, N, BK):
        a = tl.load(z + m[:, None] * s_z + (h * HEAD + start + j)[None, :])
        b = tl.load(w_uk_t + (h * N + start + j)[:, None] * R + r[None, :])
        total = tl.dot(a, b, total)
    address = (m * H + h)[:, None] * R + r[None, :]
    tl.store(out + address, total.to(out.dtype.element_ty), mask=(m < tokens)[:, None])


@triton.jit
def rotate(x, cos, sin, out, s_x, H: tl.constexpr, HEAD: tl.constexpr, PAIRS: tl.constexpr):
    """Grid (T). out [T, H, 2 * PAIRS] = of each head of x [T, H * HEAD] the first 2 * PAIRS, neighbours rotated as
    pairs by the angles of cos, sin [T, PAIRS]."""
    t, h, i = tl.program_id(0), tl.arange(0, H), tl.arange(0, PAIRS)
    # Triton-Ascend knows pairs by offsets of 2 i and 2 i + 1: whatever else is added belongs to the pointers.
    first = x + t * s_x + h[:, None] * HEAD + 2 * i[None, :]
    a, b = tl.load(first).to(tl.float32), tl.load(first + 1).to(tl.float32)
    c = tl.load(cos + t * PAIRS + i).to(tl.float32)[None, :]
    s = tl.load(sin + t * PAIRS + i).to(tl.float32)[None, :]
    address = out + (t * H + h)[:, None] * (2 * PAIRS) + 2 * i[None, :]
    tl.store(address, (a * c - b * s).to(out.dtype.element_ty))
    tl.store(address + 1, (b * c + a * s).to(out.dtype.element_ty))


@triton.jit
def write_latents(
    latent, rotary, gamma, cos, sin, slots, ckv, kpe, eps,
    s_y, s_ckv, s_kpe,
    R: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Grid (T). Row slots[t] of ckv = RMSNorm with gamma [R] of latent [T, R], of kpe = rotary [T, 2 * PAIRS] rotated,
    both with s_y between rows; a negative slot is padding."""
    t, r, i = tl.program_id(0), tl.arange(0, R), tl.arange(0, PAIRS)
    slot = tl.load(slots + t)
    if slot >= 0:
        v = tl.load(latent + t * s_y + r).to(tl.float32)
        v = v * tl.rsqrt(tl.sum(v * v, axis=0) / R + eps) * tl.load(gamma + r).to(tl.float32)
        tl.store(ckv + slot * s_ckv + r, v.to(ckv.dtype.element_ty))
        first = rotary + t * s_y + 2 * i
        a, b = tl.load(first).to(tl.float32), tl.load(first + 1).to(tl.float32)
        c, s = tl.load(cos + t * PAIRS + i).to(tl.float32), tl.load(sin + t * PAIRS + i).to(tl.float32)
        address = kpe + slot * s_kpe + 2 * i
        tl.store(address, (a * c - b * s).to(kpe.dtype.element_ty))
        tl.store(address + 1, (b * c + a * s).to(kpe.dtype.element_ty))
