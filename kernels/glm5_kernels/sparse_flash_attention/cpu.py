"""Sparse Flash Attention compiled: the chosen rows are gathered tile by tile, softmax runs along (online softmax)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numba import float32, njit

from glm5_kernels import gather
from glm5_kernels.gather import KINDS, prefetch, turn, widen
from glm5_kernels.paged import query_layout
from glm5_kernels.simd import HEADS, STEP, WIDTH, lead
from glm5_kernels.sparse_flash_attention.reference import TILE as PER_SCALE
from glm5_kernels.sparse_flash_attention.reference import check, check_packed, unpack_latents
from glm5_kernels.sparse_flash_attention.vectors import accumulate, exponentials, scale_and_peak, unpacked
from glm5_kernels.threads import each

#: Keys of a tile: with 512 + 64 columns the tile, its turned copy, the query and the output fit a 1 MiB cache.
TILE = 64
#: Kind of element of a cache of packed rows.
PACKED = 3
#: Columns of the queries that meet a tile at a time: with them it takes 16 KiB.
DEPTH = 128
#: Query tokens of a task, at most.
TOKENS = 8
#: Query tokens whose padded fp32 queries and results are held at once: a long prompt has no more of them.
SLAB = 1024


def sparse_flash_attention(
    ql_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    topk_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    round_probs: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the package docstring."""
    check(ql_nope, q_pe, ckv_cache, kpe_cache, topk_indices, seq_lens, block_table)
    ckv, kpe = _readable(ckv_cache, STEP), _readable(kpe_cache, WIDTH)
    if ckv.dtype != kpe.dtype:
        ckv, kpe = ckv.float(), kpe.float()
    place = (*gather.place(ckv), *gather.place(kpe), KINDS[ckv.dtype])
    sizes = ckv.shape[1], ckv.shape[2], kpe.shape[2]
    step = query_start_loc, seq_lens, block_table
    return _attend(ql_nope, q_pe, place, sizes, topk_indices, step, scale, round_probs)


def sparse_flash_attention_quant(
    ql_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    topk_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    round_probs: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the package docstring."""
    check_packed(ql_nope, q_pe, kv_cache, topk_indices, seq_lens, block_table)
    if kv_cache.stride(-1) != 1 or q_pe.shape[2] % WIDTH:
        ckv, kpe = unpack_latents(kv_cache, ql_nope.shape[2], q_pe.shape[2])
        return sparse_flash_attention(
            ql_nope, q_pe, ckv, kpe, topk_indices, query_start_loc, seq_lens, block_table, scale, round_probs
        )
    rank, rope = ql_nope.shape[2], q_pe.shape[2]
    place = (*gather.place(kv_cache), *gather.place(kv_cache[..., rank:]), PACKED)
    step = query_start_loc, seq_lens, block_table
    return _attend(ql_nope, q_pe, place, (kv_cache.shape[1], rank, rope), topk_indices, step, scale, round_probs)


def _attend(
    ql_nope: torch.Tensor,
    q_pe: torch.Tensor,
    place: tuple[int, ...],
    sizes: tuple[int, int, int],
    topk_indices: torch.Tensor,
    step: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    scale: float,
    round_probs: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """place: `gather.place` of latents and of rotated keys, kind of elements; sizes: block, R, P. Both SLAB by SLAB."""
    num_tokens, heads, rank = ql_nope.shape
    starts, seq_lens, block_table = step
    request, visible = query_layout(starts, seq_lens, num_tokens)
    latents, lse = torch.empty(num_tokens, heads, rank, dtype=ql_nope.dtype), torch.empty(num_tokens, heads)
    to_bf16 = int(round_probs and ql_nope.dtype == torch.bfloat16)
    table = block_table.int().numpy()
    for first in range(0, num_tokens, SLAB):
        few = slice(first, first + SLAB)
        layout = topk_indices[few].int().numpy(), visible[few].numpy(), request[few].numpy()
        out, out_lse = _slab(ql_nope[few], q_pe[few], layout, table, sizes, place, scale, to_bf16)
        latents[few], lse[few] = out[:, :heads, :rank], out_lse[:, :heads]
    return latents, lse


def _slab(
    ql_nope: torch.Tensor,
    q_pe: torch.Tensor,
    layout: tuple[Any, Any, Any],
    table: Any,
    sizes: tuple[int, int, int],
    place: tuple[int, ...],
    scale: float,
    to_bf16: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of at most SLAB tokens; fp32, heads and latents padded. layout: chosen positions, visible ones, request."""
    num_tokens, heads, rank = ql_nope.shape
    block_size, r, p = sizes
    query = torch.zeros(num_tokens, -(-heads // HEADS) * HEADS, r + p)
    query[:, :heads, :rank], query[:, :heads, r : r + q_pe.shape[-1]] = ql_nope, q_pe
    attended, lse = torch.empty(num_tokens, query.shape[1], r), torch.empty(num_tokens, query.shape[1])
    threads = torch.get_num_threads()
    size = num_tokens if threads == 1 else max(1, min(TOKENS, num_tokens // (4 * threads)))
    arrays = [query.numpy(), *layout, attended.numpy(), lse.numpy()]

    def one(number: int) -> None:
        few, chosen, seen, owner, out, out_lse = (x[size * number : size * (number + 1)] for x in arrays)
        _tokens(few, chosen, seen, owner, table, block_size, r, p, place, scale, to_bf16, out, out_lse)

    each(one, -(-num_tokens // max(size, 1)))
    return attended, lse


def _readable(cache: torch.Tensor, multiple: int) -> torch.Tensor:
    """The cache itself if its rows are bf16 or fp32 of a size the lanes divide, else a padded fp32 copy."""
    missing = -cache.shape[-1] % multiple
    if cache.dtype in (torch.bfloat16, torch.float32) and cache.stride(-1) == 1 and not missing:
        return cache
    return F.pad(cache.float(), (0, missing))


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _tokens(
    query: Any, topk_indices: Any, visible: Any, request: Any, table: Any, block_size: Any, r: Any, p: Any, place: Any,
    scale: Any, to_bf16: Any, out: Any, lse: Any,
) -> None:  # fmt: skip
    ckv, ckv_block, ckv_row, kpe, kpe_block, kpe_row, kind = place
    width = (4, 2, 1, 1)[kind]  # bytes of an element, by kind
    tokens, heads, dims = query.shape
    # Both in pieces of STEP columns, so that a piece stays in the nearest cache for all heads.
    turned, values = np.empty(dims * TILE + WIDTH, np.float32), np.empty(r * TILE + WIDTH, np.float32)
    to_turned, to_values = lead(turned), lead(values)
    plain, rotated = np.empty((TILE, r), np.float32), np.empty((TILE, p), np.float32)
    scores, lanes = np.empty((heads, TILE), np.float32), np.empty(WIDTH, np.float32)
    at_ckv, at_kpe = np.empty(TILE, np.int64), np.empty(TILE, np.int64)
    width_of_choice = topk_indices.shape[1]
    chosen, peak, total = np.empty(width_of_choice, np.int64), np.empty(heads, np.float32), np.empty(heads, np.float32)
    for token in range(tokens):
        found, blocks = 0, table[request[token]]
        for column in range(min(width_of_choice, visible[token])):
            position = topk_indices[token, column]
            if position < 0:
                break  # the first negative entry ends the list
            block = position // block_size
            if position < visible[token] and block < len(blocks) and blocks[block] >= 0:
                chosen[found] = np.int64(blocks[block]) * block_size + position % block_size
                found += 1
        mixed = out[token]
        mixed[:] = float32(0)
        peak[:] = float32(-np.inf)
        total[:] = float32(0)
        for start in range(0, found, TILE):
            n = min(TILE, found - start)
            whole = -(-n // STEP) * STEP
            for key in range(whole):
                row = chosen[start + min(key, n - 1)]  # what fills the last lanes is a row that has been written
                at_ckv[key] = _address(row, block_size, ckv, ckv_block, ckv_row)
                at_kpe[key] = _address(row, block_size, kpe, kpe_block, kpe_row)
            stored = kind
            if kind == PACKED:  # from here on the tile is what the cache would hold
                stored = 0
                for key in range(n):
                    unpacked(at_ckv[key], r // PER_SCALE, PER_SCALE, at_kpe[key] + 2 * p, plain[key].ctypes.data)
                    widen(at_kpe[key], p, 1, rotated[key].ctypes.data, STEP)
                for key in range(whole):
                    at_ckv[key] = plain[min(key, n - 1)].ctypes.data
                    at_kpe[key] = rotated[min(key, n - 1)].ctypes.data
            for key in range(whole):  # those that fill the last lanes get no weight
                widen(at_ckv[key], r, stored, values.ctypes.data + to_values + 4 * STEP * key, STEP * TILE)
            for key in range(0, whole, WIDTH):
                here = turned.ctypes.data + to_turned + 4 * (key // STEP * STEP * dims + key % STEP)
                turn(at_ckv.ctypes.data + 8 * key, r, stored, here, STEP)
                turn(at_kpe.ctypes.data + 8 * key, p, stored, here + 4 * r * STEP, STEP)
            for key in range(start + n, min(start + 2 * TILE, found)):
                row = chosen[key]
                prefetch(_address(row, block_size, ckv, ckv_block, ckv_row), r * width)
                prefetch(_address(row, block_size, kpe, kpe_block, kpe_row), p * width)
            scores[:, :whole] = float32(0)
            for key in range(0, whole, STEP):
                for first in range(0, dims, DEPTH):
                    accumulate(
                        turned.ctypes.data + to_turned + 4 * (key * dims + first * STEP), STEP,
                        query[token].ctypes.data + 4 * first, dims, heads, min(DEPTH, dims - first),
                        scores.ctypes.data + 4 * key, TILE,
                    )  # fmt: skip
            for head in range(heads):
                _soften(scores[head], n, whole, scale, to_bf16, mixed[head], peak, total, head, lanes)
            for column in range(0, r, STEP):
                accumulate(
                    values.ctypes.data + to_values + 4 * column * TILE, STEP, scores.ctypes.data, TILE, heads, whole,
                    mixed.ctypes.data + 4 * column, r,
                )  # fmt: skip
        for head in range(heads):
            if found:
                mixed[head] /= total[head]
                lse[token, head] = peak[head] + np.log(total[head])
            else:
                lse[token, head] = float32(np.inf)


@njit(nogil=True, cache=True, inline="always")  # type: ignore[untyped-decorator]
def _address(row: Any, block_size: Any, start: Any, block_bytes: Any, row_bytes: Any) -> Any:
    """Where a physical row of a cache begins."""
    return start + row // block_size * block_bytes + row % block_size * row_bytes


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _soften(
    row: Any, n: Any, whole: Any, scale: Any, to_bf16: Any, mixed: Any, peak: Any, total: Any, head: Any, lanes: Any
) -> None:
    """Scores of a tile to unnormalised probabilities; what was summed before is scaled to the new maximum."""
    for key in range(n, whole):
        row[key] = float32(-np.inf)
    scale_and_peak(row.ctypes.data, whole // WIDTH, float32(scale), lanes.ctypes.data)
    before, highest = peak[head], peak[head]
    for lane in range(WIDTH):
        highest = max(highest, lanes[lane])
    exponentials(row.ctypes.data, whole // WIDTH, highest, to_bf16, lanes.ctypes.data)
    factor = np.exp(before - highest)
    here = float32(0)
    for lane in range(WIDTH):
        here += lanes[lane]
    total[head] = total[head] * factor + here
    peak[head] = highest
    if factor != float32(1):
        for column in range(len(mixed)):
            mixed[column] *= factor
