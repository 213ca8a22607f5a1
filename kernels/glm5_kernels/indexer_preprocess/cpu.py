"""Indexer preprocess compiled: a pass over the rows of a token; the sums of its norm are added in sixteen lanes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numba import float32, int64

from glm5_kernels.compiled.jit import inner, kernel
from glm5_kernels.compiled.rotation import Angles, rotate, rotate_halves
from glm5_kernels.compiled.rows import RowAddress, load_row_as_fp32, row_address, store_row_as
from glm5_kernels.compiled.simd import STEP, WIDTH
from glm5_kernels.compiled.threads import each
from glm5_kernels.indexer_preprocess import reference

#: Tokens of a task.
_TOKENS = 64
_FLOATS = torch.float32, torch.bfloat16


class Rows(NamedTuple):
    """Queries (token, head) as they come and as they go, keys (0, token), rows (block, offset) of the cache."""

    q: RowAddress
    turned: RowAddress
    k: RowAddress
    cache: RowAddress


class Sizes(NamedTuple):
    """H, D, rows of a block; interleaved: 0 or 1; eps of the norm."""

    heads: int
    dim: int
    block_size: int
    interleaved: int
    eps: float


def indexer_preprocess(
    q: torch.Tensor,
    k: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
) -> torch.Tensor:
    """See the package docstring."""
    reference.check(q, k, norm_weight, norm_bias, cos, sin, slot_mapping, k_cache)
    tokens, heads, dim = q.shape
    fits = q.dtype in _FLOATS and k_cache.dtype == q.dtype and all(x.stride(-1) == 1 for x in (q, k, k_cache))
    if not fits or not tokens or dim % WIDTH:
        return reference.indexer_preprocess(
            q, k, norm_weight, norm_bias, eps, cos, sin, interleaved, slot_mapping, k_cache
        )
    out = torch.empty(tokens, heads, dim, dtype=q.dtype)
    rows = Rows(row_address(q), row_address(out), row_address(k[None]), row_address(k_cache))
    sizes, angles = Sizes(heads, dim, k_cache.shape[1], int(interleaved), float(eps)), Angles.of(cos, sin)
    norm = norm_weight.float().contiguous().numpy(), norm_bias.float().contiguous().numpy()
    slots = slot_mapping.long().contiguous().numpy()
    each(
        lambda task: _tokens(task * _TOKENS, min((task + 1) * _TOKENS, tokens), rows, sizes, angles, norm, slots),
        -(-tokens // _TOKENS),
    )
    return out


@kernel
def _tokens(first: Any, last: Any, rows: Any, sizes: Any, angles: Any, norm: Any, slots: Any) -> None:
    """Tokens first..last."""
    row, kind, cache = np.empty(sizes.dim, np.float32), rows.q.kind, rows.cache
    for token in range(first, last):
        for head in range(sizes.heads):
            load_row_as_fp32(_place(rows.q, token, head), sizes.dim, kind, row.ctypes.data, STEP)
            _turn(row, angles, token, sizes.interleaved)
            store_row_as(row.ctypes.data, sizes.dim, kind, _place(rows.turned, token, head))
        slot = slots[token]
        if slot >= 0:
            load_row_as_fp32(_place(rows.k, int64(0), token), sizes.dim, kind, row.ctypes.data, STEP)
            _layer_norm(row, norm[0], norm[1], sizes.eps)
            _turn(row, angles, token, sizes.interleaved)
            place = _place(cache, slot // sizes.block_size, slot % sizes.block_size)
            store_row_as(row.ctypes.data, sizes.dim, kind, place)


@inner
def _place(rows: Any, block: Any, row: Any) -> Any:
    return rows.base + block * rows.block_pitch + row * rows.row_pitch


@inner
def _turn(row: Any, angles: Any, token: Any, interleaved: Any) -> None:
    if interleaved:
        rotate(row, 0, angles, token)
    else:
        rotate_halves(row, angles, token)


@inner
def _layer_norm(x: Any, weight: Any, bias: Any, eps: Any) -> None:
    """x <- (x - mean) / sqrt(mean((x - mean)^2) + eps) * weight + bias."""
    mean = _sum(x) / float32(len(x))
    squares = np.empty(len(x), np.float32)
    for column in range(len(x)):
        x[column] -= mean
        squares[column] = x[column] * x[column]
    factor = float32(1) / np.sqrt(_sum(squares) / float32(len(x)) + float32(eps))
    for column in range(len(x)):
        x[column] = x[column] * factor * weight[column] + bias[column]


@inner
def _sum(x: Any) -> Any:
    lanes, total = np.zeros(WIDTH, np.float32), float32(0)
    for start in range(0, len(x), WIDTH):
        for lane in range(WIDTH):
            lanes[lane] += x[start + lane]
    for lane in range(WIDTH):
        total += lanes[lane]
    return total
