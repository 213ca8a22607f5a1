"""Sparse Flash Attention compiled: the chosen rows are gathered tile by tile, softmax runs along (online softmax)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numba import float32, njit

from glm5_kernels.compiled import rows as gather
from glm5_kernels.compiled.fp32_product import accumulate, accumulate_pairs
from glm5_kernels.compiled.rows import KINDS, PAIRED, interleave, narrow, prefetch, turn, widen
from glm5_kernels.compiled.simd import HEADS, PAIRS, STEP, WIDTH, lined
from glm5_kernels.compiled.threads import each
from glm5_kernels.paged_cache import query_layout
from glm5_kernels.sparse_flash_attention.cpu_intrinsics import exponentials, pair_up, scale_and_peak, unpacked
from glm5_kernels.sparse_flash_attention.reference import TILE as PER_SCALE
from glm5_kernels.sparse_flash_attention.reference import check, check_packed, unpack_latents

#: Keys of a tile: with 512 + 64 columns the tile, its turned copy, the query and the output fit a 1 MiB cache.
TILE = 64
#: Kind of element of a cache of packed rows.
PACKED = 3
#: Columns of the queries that meet a tile at a time: with them it takes 16 KiB.
DEPTH = 128
#: Query tokens of a task, at most.
TOKENS = 8


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
    ckv, kpe = (_readable(x, _whole(x.shape[-1], n)) for x, n in ((ckv_cache, STEP), (kpe_cache, WIDTH)))
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
    caches: tuple[int, ...],
    sizes: tuple[int, int, int],
    topk_indices: torch.Tensor,
    step: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    scale: float,
    round_probs: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """caches: `gather.place` of latents and of rotated keys, kind of elements; sizes: block, R, P. Both padded."""
    (num_tokens, heads, rank), dtype = ql_nope.shape, ql_nope.dtype
    starts, seq_lens, block_table = step
    request, visible = query_layout(starts, seq_lens, num_tokens)
    nope, pe = _readable(ql_nope, sizes[1]), _readable(q_pe, sizes[2])
    latents, lse = torch.empty(num_tokens, heads, sizes[1], dtype=nope.dtype), torch.empty(num_tokens, heads)
    queries = (*gather.place(nope), KINDS[nope.dtype], *gather.place(pe), KINDS[pe.dtype])
    bf16 = {queries[3], queries[7], caches[-1]} == {KINDS[torch.bfloat16]}
    if PAIRS and bf16 and not any(size % (2 * WIDTH) for size in sizes[1:]):
        caches = *caches[:-1], PAIRED
    chosen = topk_indices.int().numpy(), visible.numpy(), request.numpy(), block_table.int().numpy()
    to_bf16, out = int(round_probs and dtype == torch.bfloat16), latents.data_ptr()
    threads = torch.get_num_threads()
    size = num_tokens if threads == 1 else max(1, min(TOKENS, num_tokens // (4 * threads)))

    def some(number: int) -> None:
        few = size * number, min(size * (number + 1), num_tokens)
        _tokens(*few, queries, caches, sizes, *chosen, scale, to_bf16, out, lse.numpy())

    each(some, -(-num_tokens // max(size, 1)))
    return latents[..., :rank].to(dtype).contiguous(), lse


def _readable(x: torch.Tensor, size: int) -> torch.Tensor:
    """x itself if its rows are bf16 or fp32 and have this size, else an fp32 copy padded with zeros."""
    if x.dtype in (torch.bfloat16, torch.float32) and x.stride(-1) == 1 and x.shape[-1] == size:
        return x
    return F.pad(x.float(), (0, size - x.shape[-1]))


def _whole(size: int, part: int) -> int:
    return -(-size // part) * part


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _tokens(
    first: Any, last: Any, queries: Any, caches: Any, sizes: Any, topk_indices: Any, visible: Any, request: Any,
    table: Any, scale: Any, to_bf16: Any, out: Any, lse: Any,
) -> None:  # fmt: skip
    """Tokens first..last. queries: `gather.place` and kind of both parts; out: latents, of the first part's kind.

    Where the caches' kind is PAIRED, pairs of bf16 are multiplied: scores, and P V where P is rounded to bf16.
    """
    (nope, nope_token, nope_head, nope_kind, pe, pe_token, pe_head, pe_kind), (block_size, r, p) = queries, sizes
    kind, heads = caches[6], lse.shape[1]
    whole_heads, width, out_row = -(-heads // HEADS) * HEADS, (4, 2, 1, 1, 2)[kind], (4, 2)[nope_kind] * r
    turn_kind, widen_kind = (0, 1, 0, 0, 0)[kind], (0, 1, 0, 0, 1)[kind]  # packed rows become fp32 first
    paired, both = kind == PAIRED, kind == PAIRED and to_bf16 != 0
    per = 2 if paired else 1  # columns in 32 bits
    dims, rank = (r + p) // per, r // per
    # Both in pieces of STEP columns, so that a piece stays in the nearest cache for all heads.
    turned, values = lined(dims * TILE), lined(r * TILE)
    plain, rotated = lined(TILE * r).reshape(TILE, r), lined(TILE * p).reshape(TILE, p)
    query, mixed = np.zeros((whole_heads, dims), np.float32), lined(whole_heads * r).reshape(whole_heads, r)
    scores = lined(whole_heads * TILE).reshape(whole_heads, TILE)
    at_ckv, at_kpe = np.empty(topk_indices.shape[1] + STEP, np.int64), np.empty(topk_indices.shape[1] + STEP, np.int64)
    unpacked_ckv, unpacked_kpe = np.empty(TILE, np.int64), np.empty(TILE, np.int64)
    for key in range(TILE):
        unpacked_ckv[key], unpacked_kpe[key] = plain[key].ctypes.data, rotated[key].ctypes.data
    peak, total = np.empty(whole_heads, np.float32), np.empty(whole_heads, np.float32)
    for token in range(first, last):
        blocks = table[request[token]]
        found = _rows(topk_indices[token], visible[token], blocks, block_size, caches, at_ckv, at_kpe)
        for head in range(heads):
            start = query[head].ctypes.data
            widen(nope + token * nope_token + head * nope_head, rank, 0 if paired else nope_kind, start, STEP)
            widen(pe + token * pe_token + head * pe_head, p // per, 0 if paired else pe_kind, start + 4 * rank, STEP)
        mixed[:] = float32(0)
        peak[:] = float32(-np.inf)
        total[:] = float32(0)
        for start in range(0, found, TILE):
            n = min(TILE, found - start)
            whole = -(-n // STEP) * STEP
            ckv, kpe = at_ckv[start:].ctypes.data, at_kpe[start:].ctypes.data
            if kind == PACKED:  # from here on the tile is what the cache would hold
                for key in range(start, start + whole):
                    scales = at_kpe[key] + 2 * p
                    unpacked(at_ckv[key], r // PER_SCALE, PER_SCALE, scales, plain[key - start].ctypes.data)
                    widen(at_kpe[key], p, 1, rotated[key - start].ctypes.data, STEP)
                ckv, kpe = unpacked_ckv.ctypes.data, unpacked_kpe.ctypes.data
            for key in range(0, whole, 2 if both else 1):  # those that fill the last lanes get no weight
                here = values.ctypes.data + 4 * STEP * (key // 2 if both else key)
                if both:
                    interleave(at_ckv[start + key], at_ckv[start + key + 1], r, here, STEP * TILE)
                else:
                    row = plain[key].ctypes.data if kind == PACKED else at_ckv[start + key]
                    widen(row, r, widen_kind, here, STEP * TILE)
            for key in range(0, whole, WIDTH):
                here = turned.ctypes.data + 4 * (key // STEP * STEP * dims + key % STEP)
                turn(ckv + 8 * key, rank, turn_kind, here, STEP)
                turn(kpe + 8 * key, p // per, turn_kind, here + 4 * rank * STEP, STEP)
            for key in range(start + n, min(start + 2 * TILE, found)):
                prefetch(at_ckv[key], r * width)
                prefetch(at_kpe[key], p * width)
            scores[:, :whole] = float32(0)
            for key in range(0, whole, STEP):
                for dim in range(0, dims, DEPTH):
                    matrix, left = turned.ctypes.data + 4 * (key * dims + dim * STEP), query.ctypes.data + 4 * dim
                    depth, here = min(DEPTH, dims - dim), scores.ctypes.data + 4 * key
                    if paired:
                        accumulate_pairs(matrix, STEP, left, dims, whole_heads, depth, here, TILE)
                    else:
                        accumulate(matrix, STEP, left, dims, whole_heads, depth, here, TILE)
            for head in range(whole_heads):
                _soften(scores[head], n, whole, scale, to_bf16, mixed[head], peak, total, head)
                if both:
                    pair_up(scores[head].ctypes.data, whole // 2)
            for column in range(0, r, STEP):
                matrix, here = values.ctypes.data + 4 * column * TILE, mixed.ctypes.data + 4 * column
                if both:
                    accumulate_pairs(matrix, STEP, scores.ctypes.data, TILE, whole_heads, whole // 2, here, r)
                else:
                    accumulate(matrix, STEP, scores.ctypes.data, TILE, whole_heads, whole, here, r)
        for head in range(heads):
            lse[token, head] = float32(np.inf)
            if found:
                mixed[head] /= total[head]
                lse[token, head] = peak[head] + np.log(total[head])
            narrow(mixed[head].ctypes.data, r, nope_kind, out + (token * heads + head) * out_row)


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _rows(topk_indices: Any, visible: Any, blocks: Any, block_size: Any, caches: Any, at_ckv: Any, at_kpe: Any) -> Any:
    """How many of the chosen positions have a row, and where it begins in both caches; the last once more to STEP."""
    ckv, ckv_block, ckv_row, kpe, kpe_block, kpe_row, _ = caches
    found = 0
    for column in range(min(len(topk_indices), visible)):
        position = topk_indices[column]
        if position < 0:
            break  # the first negative entry ends the list
        index = position // block_size
        if position < visible and index < len(blocks) and blocks[index] >= 0:
            block, offset = np.int64(blocks[index]), position - index * block_size
            at_ckv[found] = ckv + block * ckv_block + offset * ckv_row
            at_kpe[found] = kpe + block * kpe_block + offset * kpe_row
            found += 1
    for key in range(found, -(-found // STEP) * STEP):  # what fills the last lanes is a row that has been written
        at_ckv[key], at_kpe[key] = at_ckv[found - 1], at_kpe[found - 1]
    return found


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _soften(
    row: Any, n: Any, whole: Any, scale: Any, to_bf16: Any, mixed: Any, peak: Any, total: Any, head: Any
) -> None:
    """Scores of a tile to unnormalised probabilities; what was summed before is scaled to the new maximum."""
    for key in range(n, whole):
        row[key] = float32(-np.inf)
    before = peak[head]
    highest = max(before, scale_and_peak(row.ctypes.data, whole // WIDTH, float32(scale)))
    here = exponentials(row.ctypes.data, whole // WIDTH, highest, to_bf16)
    factor = np.exp(before - highest)
    total[head] = total[head] * factor + here
    peak[head] = highest
    if factor != float32(1):
        for column in range(len(mixed)):
            mixed[column] *= factor
