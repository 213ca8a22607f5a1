"""MLA preprocess compiled: integer products (`int8_product`), and norms, rotations and cache writes in a pass.

The same numbers as the reference but for the order in which the squares of a row are added.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numba import float32

from glm5_kernels.compiled.fp32_product import per_head
from glm5_kernels.compiled.int8_product import apply_linear
from glm5_kernels.compiled.int8_rows import COMPILED, FLOATS
from glm5_kernels.compiled.jit import inner, kernel
from glm5_kernels.compiled.rotation import Angles, rotate
from glm5_kernels.compiled.rows import ELEMENT_BYTES, KINDS, RowAddress, load_row_as_fp32, row_address, store_row_as
from glm5_kernels.compiled.simd import STEP, WIDTH
from glm5_kernels.compiled.threads import each
from glm5_kernels.int8 import LinearWeights
from glm5_kernels.mla_preprocess import reference

#: Tokens of a task.
_TOKENS = 32


class Norms(NamedTuple):
    """q_gamma: fp32 [q_lora]. kv_gamma: fp32 [kv_lora]. eps: of both."""

    q_gamma: Any
    kv_gamma: Any
    eps: float


class Target(NamedTuple):
    """Rows (block, offset) of both caches, rows of a block, slots int64 [T] (negative: written nowhere)."""

    ckv: RowAddress
    kpe: RowAddress
    block_size: int
    slots: Any


def mla_preprocess(
    hidden_states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    qkv_a: LinearWeights,
    q_b: LinearWeights,
    w_uk_t: torch.Tensor,
    q_a_gamma: torch.Tensor,
    kv_a_gamma: torch.Tensor,
    slot_mapping: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See the package docstring."""
    operands = hidden_states, cos, sin, qkv_a, q_b, w_uk_t, q_a_gamma, kv_a_gamma, slot_mapping, ckv_cache, kpe_cache
    reference.check(*operands)
    (tokens, _), dtype, (heads, nope, kv_lora) = hidden_states.shape, hidden_states.dtype, w_uk_t.shape
    q_lora, rope = q_a_gamma.numel(), kpe_cache.shape[-1]
    caches = ckv_cache, kpe_cache
    fits = dtype in FLOATS and all(cache.dtype == dtype and cache.stride(-1) == 1 for cache in caches)
    if not fits or not tokens or any(size % WIDTH for size in (q_lora, kv_lora, rope, nope)):
        return reference.mla_preprocess(*operands, eps, arithmetic=COMPILED)
    kind, angles = KINDS[dtype], Angles.of(cos, sin)
    y = apply_linear(hidden_states, qkv_a, dtype).contiguous()
    q_c, norms = torch.empty(tokens, q_lora), Norms(q_a_gamma.float().numpy(), kv_a_gamma.float().numpy(), eps)
    target = Target(row_address(ckv_cache), row_address(kpe_cache), ckv_cache.shape[1], slot_mapping.long().numpy())
    each(
        lambda task: _latents(y.data_ptr(), kind, *_part(task, tokens), norms, angles, target, q_c.view(-1).numpy()),
        -(-tokens // _TOKENS),
    )
    z = apply_linear(q_c if q_b.scale is not None else q_c.to(dtype), q_b, dtype).contiguous()
    q_pe = torch.empty(tokens, heads, rope, dtype=dtype)
    sizes = heads, nope, rope
    each(
        lambda task: _queries(z.data_ptr(), kind, *_part(task, tokens), sizes, angles, q_pe.data_ptr()),
        -(-tokens // _TOKENS),
    )
    return per_head(z.view(tokens, heads, nope + rope)[..., :nope], w_uk_t), q_pe, q_c.to(dtype)


def _part(number: int, tokens: int) -> tuple[int, int]:
    return number * _TOKENS, min((number + 1) * _TOKENS, tokens)


@kernel
def _latents(y: Any, kind: Any, first: Any, last: Any, norms: Any, angles: Any, target: Any, q_c: Any) -> None:
    """q_c fp32 [T * q_lora] and the rows of both caches, for tokens first..last.

    y: address of [T, q_lora + kv_lora + rope] elements of `kind`: query, latent, key to be rotated.
    """
    size, q, kv, rope = ELEMENT_BYTES[kind], len(norms.q_gamma), len(norms.kv_gamma), 2 * angles.cos.shape[1]
    ckv, kpe = target.ckv, target.kpe
    row = np.empty(q + kv + rope, np.float32)
    for token in range(first, last):
        load_row_as_fp32(y + token * len(row) * size, len(row), kind, row.ctypes.data, STEP)
        _norm(row, 0, norms.q_gamma, norms.eps, q_c, token * q)
        slot = target.slots[token]
        if slot < 0:
            continue
        _norm(row, q, norms.kv_gamma, norms.eps, row, q)
        rotate(row, q + kv, angles, token)
        block, offset = slot // target.block_size, slot % target.block_size
        store_row_as(row.ctypes.data + 4 * q, kv, kind, ckv.base + block * ckv.block_pitch + offset * ckv.row_pitch)
        kpe_row = kpe.base + block * kpe.block_pitch + offset * kpe.row_pitch
        store_row_as(row.ctypes.data + 4 * (q + kv), rope, kind, kpe_row)


@kernel
def _queries(z: Any, kind: Any, first: Any, last: Any, sizes: Any, angles: Any, q_pe: Any) -> None:
    """The rotated part of each head's query, for tokens first..last.

    z, q_pe: addresses of [T, heads, nope + rope] and [T, heads, rope] elements of `kind`.
    """
    heads, nope, rope = sizes
    size, row = ELEMENT_BYTES[kind], np.empty(rope, np.float32)
    for token in range(first, last):
        for head in range(token * heads, (token + 1) * heads):
            load_row_as_fp32(z + size * (head * (nope + rope) + nope), rope, kind, row.ctypes.data, STEP)
            rotate(row, 0, angles, token)
            store_row_as(row.ctypes.data, rope, kind, q_pe + size * head * rope)


@inner
def _norm(x: Any, first: Any, gamma: Any, eps: Any, out: Any, place: Any) -> None:
    """out, from `place` on, <- x / sqrt(mean(x^2) + eps) * gamma of x from `first` on; squares added in 16 lanes."""
    lanes, size = np.zeros(WIDTH, np.float32), len(gamma)
    for start in range(first, first + size, WIDTH):
        for lane in range(WIDTH):
            lanes[lane] += x[start + lane] * x[start + lane]
    total = float32(0)
    for lane in range(WIDTH):
        total += lanes[lane]
    factor = float32(1) / np.sqrt(total / float32(size) + float32(eps))
    for column in range(size):
        out[place + column] = x[first + column] * factor * gamma[column]
