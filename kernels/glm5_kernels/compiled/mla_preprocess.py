"""MLA preprocess compiled: integer products (`int8_product`), and norms, rotations and cache writes in a pass.

The same numbers as the reference but for the order in which the squares of a row are added.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import float32

from glm5_kernels.compiled.fp32_product import bind_per_head, per_head
from glm5_kernels.compiled.int8_product import Product, apply_linear, bind_linear
from glm5_kernels.compiled.int8_rows import COMPILED, FLOATS
from glm5_kernels.compiled.jit import inner, kernel
from glm5_kernels.compiled.rotation import Angles, rotate
from glm5_kernels.compiled.rows import ELEMENT_BYTES, KINDS, RowAddress, load_row_as_fp32, row_address, store_row_as
from glm5_kernels.compiled.simd import STEP, WIDTH
from glm5_kernels.compiled.threads import bound
from glm5_kernels.int8 import LinearWeights
from glm5_kernels.mla_preprocess import reference
from glm5_kernels.workspace import Bound, Workspace

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
    (tokens, _), dtype, (heads, nope, _) = hidden_states.shape, hidden_states.dtype, w_uk_t.shape
    if not _takes(*operands):
        return reference.mla_preprocess(*operands, eps, arithmetic=COMPILED)
    y, q_c = apply_linear(hidden_states, qkv_a, dtype).contiguous(), torch.empty(tokens, q_a_gamma.numel())
    angles, rope = Angles.of(cos, sin), kpe_cache.shape[-1]
    _bind_latents(y, angles, q_a_gamma, kv_a_gamma, slot_mapping.long(), ckv_cache, kpe_cache, eps, q_c)()
    z = apply_linear(q_c if q_b.scale is not None else q_c.to(dtype), q_b, dtype).contiguous()
    q_pe = torch.empty(tokens, heads, rope, dtype=dtype)
    _bind_queries(z, nope, angles, q_pe)()
    return per_head(z.view(tokens, heads, nope + rope)[..., :nope], w_uk_t), q_pe, q_c.to(dtype)


def bind(
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
    room: Workspace,
    products: tuple[Product | None, Product | None] = (None, None),
) -> Bound | None:
    """`mla_preprocess` bound to its operands; None for those that compiled code does not take.

    cos, sin: fp32, contiguous. slot_mapping: int64; who calls has looked at the slots that it holds by then.
    products: see `bind_linear`; of qkv_a and q_b.
    """
    operands = hidden_states, cos, sin, qkv_a, q_b, w_uk_t, q_a_gamma, kv_a_gamma, slot_mapping, ckv_cache, kpe_cache
    reference.check(*operands)
    if not _takes(*operands) or slot_mapping.dtype != torch.int64:
        return None
    (tokens, _), dtype, (heads, nope, kv_lora) = hidden_states.shape, hidden_states.dtype, w_uk_t.shape
    q_lora, rope, angles = q_a_gamma.numel(), kpe_cache.shape[-1], Angles.bound(cos, sin)
    y, z = (room.tensor("rows of a linear", (tokens, len(w.weight)), dtype) for w in (qkv_a, q_b))
    q_c, q_c_as_fp32 = room.tensor("q_c", (tokens, q_lora), dtype), room.tensor("q_c", (tokens, q_lora), torch.float32)
    q_pe = room.tensor("q_pe", (tokens, heads, rope), dtype)
    ql_nope = room.tensor("ql_nope", (tokens, heads, kv_lora), dtype)
    calls = (
        bind_linear(hidden_states, qkv_a, y, room, products[0]),
        _bind_latents(y, angles, q_a_gamma, kv_a_gamma, slot_mapping, ckv_cache, kpe_cache, eps, q_c_as_fp32),
        lambda: q_c.copy_(q_c_as_fp32),
        bind_linear(q_c_as_fp32 if q_b.scale is not None else q_c, q_b, z, room, products[1]),
        _bind_queries(z, nope, angles, q_pe),
        bind_per_head(z.view(tokens, heads, nope + rope)[..., :nope], w_uk_t, ql_nope),
    )
    return Bound(calls, (ql_nope, q_pe, q_c), *operands)


def _takes(hidden_states: torch.Tensor, *rest: Any) -> bool:
    """Whether compiled code takes these operands, which fit the contract."""
    w_uk_t, q_a_gamma, ckv_cache, kpe_cache = rest[4], rest[5], *rest[8:10]
    dtype, sizes = hidden_states.dtype, (*w_uk_t.shape[1:], q_a_gamma.numel(), kpe_cache.shape[-1])
    for cache in (ckv_cache, kpe_cache):
        if cache.dtype != dtype or cache.stride(-1) != 1:
            return False
    return dtype in FLOATS and len(hidden_states) > 0 and not any(size % WIDTH for size in sizes)


def _bind_latents(
    y: torch.Tensor, angles: Angles, q_gamma: torch.Tensor, kv_gamma: torch.Tensor, slots: torch.Tensor,
    ckv: torch.Tensor, kpe: torch.Tensor, eps: float, q_c: torch.Tensor,
) -> Callable[[], object]:  # fmt: skip
    norms = Norms(q_gamma.float().numpy(), kv_gamma.float().numpy(), eps)
    target = Target(row_address(ckv), row_address(kpe), ckv.shape[1], slots.numpy())
    operands = norms, angles, target, q_c.view(-1).numpy()
    return bound(_latents, len(y), _TOKENS, y.data_ptr(), KINDS[y.dtype], *operands)


def _bind_queries(z: torch.Tensor, nope: int, angles: Angles, q_pe: torch.Tensor) -> Callable[[], object]:
    sizes = q_pe.shape[1], nope, q_pe.shape[2]
    return bound(_queries, len(z), _TOKENS, z.data_ptr(), KINDS[z.dtype], sizes, angles, q_pe.data_ptr())


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
