"""MLA preprocess compiled: integer products (`few_rows`, `int8_rows`), and norms, rotations and cache writes in a pass.

The same numbers as the reference but for the order in which the squares of a row are added.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import float32, njit

from glm5_kernels.compiled.fp32_product import per_head
from glm5_kernels.compiled.int8_product import apply_linear
from glm5_kernels.compiled.int8_rows import COMPILED, FLOATS
from glm5_kernels.compiled.rows import KINDS, narrow, place, widen
from glm5_kernels.compiled.simd import STEP, WIDTH
from glm5_kernels.compiled.threads import each
from glm5_kernels.int8 import LinearWeights
from glm5_kernels.mla_preprocess import reference

#: Tokens of a task.
_TOKENS = 32


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
    kind, angles = KINDS[dtype], tuple(part.float().contiguous().numpy() for part in (cos, sin))
    y = apply_linear(hidden_states, qkv_a, dtype).contiguous()
    q_c, places = torch.empty(tokens, q_lora), tuple(place(cache) for cache in caches)
    gammas, slots = (q_a_gamma.float().numpy(), kv_a_gamma.float().numpy()), slot_mapping.long().numpy()
    each(
        lambda number: _latents(
            y.data_ptr(), kind, *_part(number, tokens), *gammas, *angles, eps, slots, *places, ckv_cache.shape[1],
            q_c.numpy(),
        ),
        -(-tokens // _TOKENS),
    )  # fmt: skip
    z = apply_linear(q_c if q_b.scale is not None else q_c.to(dtype), q_b, dtype).contiguous()
    q_pe = torch.empty(tokens, heads, rope, dtype=dtype)
    each(
        lambda number: _queries(
            z.data_ptr(), kind, *_part(number, tokens), heads, nope, rope, *angles, q_pe.data_ptr()
        ),
        -(-tokens // _TOKENS),
    )  # fmt: skip
    return per_head(z.view(tokens, heads, nope + rope)[..., :nope], w_uk_t), q_pe, q_c.to(dtype)


def _part(number: int, tokens: int) -> tuple[int, int]:
    return number * _TOKENS, min((number + 1) * _TOKENS, tokens)


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _latents(
    y: Any, kind: Any, first: Any, last: Any, q_gamma: Any, kv_gamma: Any, cos: Any, sin: Any, eps: Any, slots: Any,
    ckv: Any, kpe: Any, block_size: Any, q_c: Any,
) -> None:  # fmt: skip
    """q_c, and the row of both caches, of tokens first..last from their rows of y: query, latent, key to be rotated."""
    size, q, kv, rope = 2 if kind else 4, len(q_gamma), len(kv_gamma), 2 * cos.shape[1]
    row = np.empty(q + kv + rope, np.float32)
    for token in range(first, last):
        widen(y + token * len(row) * size, len(row), kind, row.ctypes.data, STEP)
        _norm(row[:q], q_gamma, eps, q_c[token])
        slot = slots[token]
        if slot < 0:
            continue
        _norm(row[q : q + kv], kv_gamma, eps, row[q : q + kv])
        _rotate(row[q + kv :], cos[token], sin[token])
        block, offset = slot // block_size, slot % block_size
        narrow(row.ctypes.data + 4 * q, kv, kind, ckv[0] + block * ckv[1] + offset * ckv[2])
        narrow(row.ctypes.data + 4 * (q + kv), rope, kind, kpe[0] + block * kpe[1] + offset * kpe[2])


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _queries(
    z: Any, kind: Any, first: Any, last: Any, heads: Any, nope: Any, rope: Any, cos: Any, sin: Any, q_pe: Any
) -> None:
    """The rotated part of each head's query of tokens first..last."""
    size, row = 2 if kind else 4, np.empty(rope, np.float32)
    for token in range(first, last):
        for head in range(token * heads, (token + 1) * heads):
            widen(z + size * (head * (nope + rope) + nope), rope, kind, row.ctypes.data, STEP)
            _rotate(row, cos[token], sin[token])
            narrow(row.ctypes.data, rope, kind, q_pe + size * head * rope)


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _norm(x: Any, gamma: Any, eps: Any, out: Any) -> None:
    """out <- x / sqrt(mean(x^2) + eps) * gamma; squares added in sixteen lanes."""
    lanes = np.zeros(WIDTH, np.float32)
    for start in range(0, len(x), WIDTH):
        for lane in range(WIDTH):
            lanes[lane] += x[start + lane] * x[start + lane]
    total = float32(0)
    for lane in range(WIDTH):
        total += lanes[lane]
    factor = float32(1) / np.sqrt(total / float32(len(x)) + float32(eps))
    for column in range(len(x)):
        out[column] = x[column] * factor * gamma[column]


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _rotate(x: Any, cos: Any, sin: Any) -> None:
    """The pairs (0, 1), (2, 3), ... of x by their angles, in place."""
    for pair in range(len(cos)):
        even, odd = x[2 * pair], x[2 * pair + 1]
        x[2 * pair], x[2 * pair + 1] = even * cos[pair] - odd * sin[pair], odd * cos[pair] + even * sin[pair]
