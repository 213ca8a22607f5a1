"""Indexer preprocess compiled: one pass over the rows of a token; sums of the norm are added in sixteen lanes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numba import float32, int64

from glm5_kernels.compiled.int8_quantize import FLOATS
from glm5_kernels.compiled.jit import inner, kernel
from glm5_kernels.compiled.rotation import Angles, rotate, rotate_halves
from glm5_kernels.compiled.rows import RowAddress, load_row_as_fp32, matrix_address, row_address, store_row_as
from glm5_kernels.compiled.simd import STEP, WIDTH
from glm5_kernels.compiled.threads import run_ranges
from glm5_kernels.indexer_preprocess import IndexerPreprocess, reference

#: Tokens of a task.
_TOKENS = 64


class Rows(NamedTuple):
    """Rows (token, head) of the queries and the rotated queries, (0, token) of keys, (block, offset) of the cache."""

    q: RowAddress
    rotated: RowAddress
    k: RowAddress
    cache: RowAddress


class Sizes(NamedTuple):
    """H, D, rows of a block; interleaved: 0 or 1; eps of the norm."""

    heads: int
    dim: int
    block_size: int
    interleaved: int
    eps: float


def indexer_preprocess(operands: IndexerPreprocess) -> torch.Tensor:
    q, k, norm_weight, norm_bias, eps, cos, sin, interleaved, slot_mapping, k_cache = operands
    if not _is_compiled(q, k, k_cache):
        return reference.indexer_preprocess(operands)
    out, slots = torch.empty(q.shape, dtype=q.dtype), slot_mapping.long().contiguous()
    rows = Rows(row_address(q), row_address(out), matrix_address(k), row_address(k_cache))
    sizes = Sizes(q.shape[1], q.shape[2], k_cache.shape[1], int(interleaved), float(eps))
    norm = norm_weight.float().contiguous().numpy(), norm_bias.float().contiguous().numpy()
    run_ranges(_tokens, len(q), _TOKENS, rows, sizes, Angles.of(cos, sin), *norm, slots.numpy())
    return out


def _is_compiled(q: torch.Tensor, k: torch.Tensor, k_cache: torch.Tensor) -> bool:
    contiguous_rows = all(x.stride(-1) == 1 for x in (q, k, k_cache))
    return q.dtype in FLOATS and k_cache.dtype == q.dtype and contiguous_rows and len(q) > 0 and not q.shape[2] % WIDTH


@kernel
def _tokens(first: Any, last: Any, rows: Any, sizes: Any, angles: Any, weight: Any, bias: Any, slots: Any) -> None:
    row, kind, cache = np.empty(sizes.dim, np.float32), rows.q.kind, rows.cache
    for token in range(first, last):
        for head in range(sizes.heads):
            load_row_as_fp32(_address(rows.q, token, head), sizes.dim, kind, row.ctypes.data, STEP)
            _rotate(row, angles, token, sizes.interleaved)
            store_row_as(row.ctypes.data, sizes.dim, kind, _address(rows.rotated, token, head))
        slot = slots[token]
        if slot >= 0:
            load_row_as_fp32(_address(rows.k, int64(0), token), sizes.dim, kind, row.ctypes.data, STEP)
            _layer_norm(row, weight, bias, sizes.eps)
            _rotate(row, angles, token, sizes.interleaved)
            target = _address(cache, slot // sizes.block_size, slot % sizes.block_size)
            store_row_as(row.ctypes.data, sizes.dim, kind, target)


@inner
def _address(rows: Any, block: Any, row: Any) -> Any:
    return rows.base + block * rows.block_pitch + row * rows.row_pitch


@inner
def _rotate(row: Any, angles: Any, token: Any, interleaved: Any) -> None:
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
