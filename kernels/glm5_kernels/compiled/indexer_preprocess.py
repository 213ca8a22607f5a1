"""Indexer preprocess compiled: a pass over the rows of a token; the sums of its norm are added in sixteen lanes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import float32, int64

from glm5_kernels.compiled.jit import inner, kernel
from glm5_kernels.compiled.rotation import Angles, rotate, rotate_halves
from glm5_kernels.compiled.rows import RowAddress, load_row_as_fp32, row_address, store_row_as
from glm5_kernels.compiled.simd import STEP, WIDTH
from glm5_kernels.compiled.threads import bound
from glm5_kernels.indexer_preprocess import reference
from glm5_kernels.workspace import Bound, Workspace

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
    operands = q, k, norm_weight, norm_bias, eps, cos, sin, interleaved, slot_mapping, k_cache
    reference.check(q, k, norm_weight, norm_bias, cos, sin, slot_mapping, k_cache)
    if not _takes(q, k, k_cache):
        return reference.indexer_preprocess(*operands)
    out, slots = torch.empty(q.shape, dtype=q.dtype), slot_mapping.long().contiguous()
    _bind_tokens(q, k, norm_weight, norm_bias, eps, Angles.of(cos, sin), interleaved, slots, k_cache, out)()
    return out


def bind(
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
    room: Workspace,
) -> Bound | None:
    """`indexer_preprocess` bound to its operands; None for those that compiled code does not take.

    cos, sin: fp32, contiguous. slot_mapping: int64; who calls has looked at the slots that it holds by then.
    """
    reference.check(q, k, norm_weight, norm_bias, cos, sin, slot_mapping, k_cache)
    if not _takes(q, k, k_cache) or slot_mapping.dtype != torch.int64:
        return None
    out, angles = room.tensor("turned", tuple(q.shape), q.dtype), Angles.bound(cos, sin)
    call = _bind_tokens(q, k, norm_weight, norm_bias, eps, angles, interleaved, slot_mapping, k_cache, out)
    return Bound([call], (out,), q, k, angles, slot_mapping, k_cache)


def _takes(q: torch.Tensor, k: torch.Tensor, k_cache: torch.Tensor) -> bool:
    """Whether compiled code takes these operands, which fit the contract."""
    tokens, _, dim = q.shape
    plain = q.dtype in _FLOATS and k_cache.dtype == q.dtype and all(x.stride(-1) == 1 for x in (q, k, k_cache))
    return plain and tokens > 0 and not dim % WIDTH


def _bind_tokens(
    q: torch.Tensor, k: torch.Tensor, norm_weight: torch.Tensor, norm_bias: torch.Tensor, eps: float, angles: Angles,
    interleaved: bool, slots: torch.Tensor, k_cache: torch.Tensor, out: torch.Tensor,
) -> Callable[[], object]:  # fmt: skip
    tokens, heads, dim = q.shape
    rows = Rows(row_address(q), row_address(out), row_address(k[None]), row_address(k_cache))
    sizes = Sizes(heads, dim, k_cache.shape[1], int(interleaved), float(eps))
    norm = norm_weight.float().contiguous().numpy(), norm_bias.float().contiguous().numpy()
    return bound(_tokens, tokens, _TOKENS, rows, sizes, angles, norm, slots.numpy())


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
