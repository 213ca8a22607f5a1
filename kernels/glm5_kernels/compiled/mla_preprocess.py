"""MLA preprocess compiled: integer products (`int8_linear`), and one pass for norms, rotations and cache writes.

Numbers differ from the reference only by the order in which the squares of a row are added.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from glm5_kernels.compiled.fp32_product import per_head
from glm5_kernels.compiled.int8_linear import apply_linear
from glm5_kernels.compiled.int8_quantize import FLOATS
from glm5_kernels.compiled.jit import inner, kernel
from glm5_kernels.compiled.rms_norm import rms_factor
from glm5_kernels.compiled.rotation import Angles, rotate
from glm5_kernels.compiled.rows import ELEMENT_BYTES, KINDS, RowAddress, load_row_as_fp32, row_address, store_row_as
from glm5_kernels.compiled.simd import STEP, WIDTH
from glm5_kernels.compiled.threads import run_ranges
from glm5_kernels.mla_preprocess import MlaPreprocess, reference

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


def mla_preprocess(operands: MlaPreprocess) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden_states, cos, sin, qkv_a, q_b, w_uk_t, q_a_gamma, kv_a_gamma, slot_mapping, *caches, eps = operands
    if not _is_compiled(hidden_states, w_uk_t, q_a_gamma, *caches):
        return reference.mla_preprocess(operands)
    ckv_cache, kpe_cache = caches
    (tokens, _), dtype, (heads, nope, _) = hidden_states.shape, hidden_states.dtype, w_uk_t.shape
    rope, angles = kpe_cache.shape[-1], Angles.of(cos, sin)
    y, q_c = apply_linear(hidden_states, qkv_a, dtype).contiguous(), torch.empty(tokens, q_a_gamma.numel())
    norms = Norms(q_a_gamma.float().numpy(), kv_a_gamma.float().numpy(), eps)
    slots = slot_mapping.long()
    target = Target(row_address(ckv_cache), row_address(kpe_cache), ckv_cache.shape[1], slots.numpy())
    latents = y.data_ptr(), KINDS[dtype], norms, angles, target, q_c.view(-1).numpy()
    run_ranges(_latents, tokens, _TOKENS, *latents)
    z = apply_linear(q_c if q_b.scale is not None else q_c.to(dtype), q_b, dtype).contiguous()
    q_pe = torch.empty(tokens, heads, rope, dtype=dtype)
    queries = z.data_ptr(), KINDS[dtype], (heads, nope, rope), angles, q_pe.data_ptr()
    run_ranges(_queries, tokens, _TOKENS, *queries)
    return per_head(z.view(tokens, heads, nope + rope)[..., :nope], w_uk_t), q_pe, q_c.to(dtype)


def _is_compiled(
    hidden_states: torch.Tensor, w_uk_t: torch.Tensor, q_a_gamma: torch.Tensor, *caches: torch.Tensor
) -> bool:
    dtype, sizes = hidden_states.dtype, (*w_uk_t.shape[1:], q_a_gamma.numel(), caches[1].shape[-1])
    plain_caches = all(cache.dtype == dtype and cache.stride(-1) == 1 for cache in caches)
    return plain_caches and dtype in FLOATS and len(hidden_states) > 0 and not any(size % WIDTH for size in sizes)


@kernel
def _latents(first: Any, last: Any, y: Any, kind: Any, norms: Any, angles: Any, target: Any, q_c: Any) -> None:
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
def _queries(first: Any, last: Any, z: Any, kind: Any, sizes: Any, angles: Any, q_pe: Any) -> None:
    """The rotated part of each head's query, for tokens first..last.

    sizes: heads, and the dims of a head without and with rotation.
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
def _norm(x: Any, first: Any, gamma: Any, eps: Any, out: Any, offset: Any) -> None:
    """out, from `offset` on, <- x / sqrt(mean(x^2) + eps) * gamma of x from `first` on."""
    factor = rms_factor(x, first, len(gamma), eps)
    for column in range(len(gamma)):
        out[offset + column] = x[first + column] * factor * gamma[column]
