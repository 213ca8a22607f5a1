"""Lightning Indexer as Triton kernels: scores by pages, the choice of each row, its order.

Shaped for one core of a 910B/910C (64 KB L0A and L0B, 128 KB L0C, 192 KB UB), at GLM-5's 32 heads of 128:

    score_pages      [BT * H, D] x [D, PAGE]: 32 x 128 x 128 in decode, 64 x 128 x 128 where a request has several
                     tokens, which share its keys. A page is one run of memory. A program takes many pages in a loop:
                     the copy of the next page, the cube and the vector cores work side by side. One program per core.
    choose_level     one row of scores, TILE = 2048 (8 KB) at a time: the K-th score is found bit by bit, by counting
                     floats (vector cores compare floats, not integers), until exactly K reach it; no sort.
                     Hits are added lane by lane and summed once per count. A row is read from L2 once per bit.
    place_positions  those positions in order, SCAN = 64 at a time: a prefix sum and a compaction, both as 64 x 64
                     comparisons (16 KB), and one copy. A row in parts, so that a few rows fill all vector cores.
    order_positions  the rank of each of K positions by counting the better ones, 64 x 128 at a time (32 KB).

A score that is NaN means: not there.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def score_pages(
    q, k, weights, q_scale, k_scale, block_table, groups, visible, out,
    s_kb, s_ks, s_table, s_out, pages,
    H: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, PAGE: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """Grid (groups, S / (pages * PAGE)). groups int32 [G, 3]: first token, number of tokens <= BT, request. q [T, H, D]
    contiguous; k [num_blocks, PAGE, D]; weights and q_scale [T, H]; k_scale [num_blocks, PAGE]; out fp32 [T, S].
    """
    g, part = tl.program_id(0), tl.program_id(1)
    first, count, request = tl.load(groups + g * 3), tl.load(groups + g * 3 + 1), tl.load(groups + g * 3 + 2)
    row, d, s, token = tl.arange(0, BT * H), tl.arange(0, D), tl.arange(0, PAGE), tl.arange(0, BT)
    asked = row < count * H
    queries = tl.load(q + (first * H + row)[:, None] * D + d[None, :], mask=asked[:, None], other=0)
    weight = tl.load(weights + first * H + row, mask=asked, other=0.0).to(tl.float32)
    if INT8:
        weight_scale = tl.load(q_scale + first * H + row, mask=asked, other=0.0).to(tl.float32)
    seen = tl.load(visible + first + token, mask=token < count, other=0)
    last = tl.load(visible + first + count - 1)
    for page in range(part * pages, tl.minimum((part + 1) * pages, (last + PAGE - 1) // PAGE)):
        block = tl.load(block_table + request * s_table + page)
        if block >= 0:
            keys = tl.load(k + block * s_kb + s[:, None] * s_ks + d[None, :])
            dots = tl.dot(queries, tl.trans(keys)).to(tl.float32)
            if INT8:
                dots = dots * weight_scale[:, None]
            weighted = tl.maximum(dots, 0.0) * weight[:, None]
            score = tl.sum(tl.reshape(weighted, (BT, H, PAGE)), axis=1)
            if INT8:
                score = score * tl.load(k_scale + block * PAGE + s).to(tl.float32)[None, :]
            column = page * PAGE + s
            score = tl.where(column[None, :] < seen[:, None], score, float("nan"))
            tl.store(out + (first + token)[:, None] * s_out + column[None, :], score, mask=(token < count)[:, None])


@triton.jit
def _number(key):
    """The float that is number `key` (int32) in ascending order; beyond the infinities there are NaNs."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _count(scores, length, level, last, EQUAL: tl.constexpr, TILE: tl.constexpr):
    """How many of scores [length] reach `level`, or with EQUAL: equal it at a position up to `last`."""
    i = tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.float32)
    for start in range(0, length, TILE):
        score = tl.load(scores + start + i, mask=start + i < length, other=float("nan"))
        if EQUAL:
            hit = (score == level) & (start + i <= last)
        else:
            hit = score >= level
        total += tl.where(hit, 1.0, 0.0)
    return tl.sum(total, axis=0)


@triton.jit
def choose_level(scores, visible, level_out, last_out, number, s_scores, topk, TILE: tl.constexpr):
    """Grid (T). Of scores [T, S] the min(topk, those that are there) best, lowest position among equals, are those
    above level_out fp32 [T], and those that equal it at positions up to last_out int32 [T]; number int32 [T]."""
    t = tl.program_id(0)
    row, length = scores + t * s_scores, tl.load(visible + t)
    there = _count(row, length, float("-inf"), 0, False, TILE)
    want = tl.minimum(there, topk * 1.0)
    # The largest float that `want` scores reach: its sign, then its other bits from the highest down, until exactly
    # `want` reach it.
    reach = _count(row, length, 0.0, 0, False, TILE)
    key = tl.where(reach >= want, 0, -2147483648)
    reach = tl.where(reach >= want, reach, there)
    for bit in range(0, 31):
        if reach > want:
            tried = key + (1 << (30 - bit))
            found = _count(row, length, _number(tried), 0, False, TILE)
            key = tl.where(found >= want, tried, key)
            reach = tl.where(found >= want, found, reach)
    level = _number(key)
    level = tl.where(level == level, level, float("-inf"))
    # Of those that equal the level the first ones, up to position `last`.
    last = length
    if reach > want:
        need = want - (reach - _count(row, length, level, length, True, TILE))
        last = 0
        for bit in range(0, 31):
            tried = last | (1 << (30 - bit))
            # positions below `tried` hold too few: the cut lies at or after it
            last = tl.where(_count(row, length, level, tried - 1, True, TILE) < need, tried, last)
    tl.store(level_out + t, level)
    tl.store(last_out + t, last)
    tl.store(number + t, want.to(tl.int32))


@triton.jit
def place_positions(
    scores, visible, level_in, last_in, positions, chosen, s_scores, s_out, step,
    TILE: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """Grid (T, S / step), step a multiple of TILE. The positions that `choose_level` has chosen, in order, to positions
    int32 [T, >= topk] and their scores to chosen fp32; a program counts those before its part."""
    t, part = tl.program_id(0), tl.program_id(1)
    row, length = scores + t * s_scores, tl.load(visible + t)
    level, last = tl.load(level_in + t), tl.load(last_in + t)
    begin = part * step
    if begin < length:
        k = tl.arange(0, TILE)
        earlier = tl.zeros([TILE], tl.float32)
        for start in range(0, begin, TILE):
            score = tl.load(row + start + k)
            taken = (score > level) | ((score == level) & (start + k <= last))
            earlier += tl.where(taken, 1.0, 0.0)
        base = tl.sum(earlier, axis=0).to(tl.int32)
        i = tl.arange(0, SCAN)
        j = i.to(tl.float32)
        for start in range(begin, tl.minimum(begin + step, length), SCAN):
            score = tl.load(row + start + i, mask=start + i < length, other=float("nan"))
            taken = (score > level) | ((score == level) & (start + i <= last))
            one = tl.where(taken, 1.0, 0.0)
            count = tl.sum(one, axis=0).to(tl.int32)
            if count > 0:
                # place j gets the one that has j taken before it
                before = tl.sum(tl.where(i[:, None] < i[None, :], one[:, None], 0.0), axis=0)
                before = tl.where(taken, before, -1.0)
                here = before[:, None] == j[None, :]
                place = tl.sum(tl.where(here, (start + i).to(tl.float32)[:, None], 0.0), axis=0)
                value = tl.sum(tl.where(here, score[:, None], 0.0), axis=0)
                tl.store(positions + t * s_out + base + i, place.to(tl.int32), mask=i < count)
                tl.store(chosen + t * s_out + base + i, value, mask=i < count)
                base += count


@triton.jit
def order_positions(positions, chosen, number, out, s_in, s_out, BI: tl.constexpr, BJ: tl.constexpr):
    """Grid (T, topk / BI). out int32 [T, topk]: positions by falling score, lowest position first among equals."""
    t, block = tl.program_id(0), tl.program_id(1)
    n = tl.load(number + t)
    if block * BI < n:
        i, j = block * BI + tl.arange(0, BI), tl.arange(0, BJ)
        mine = tl.load(chosen + t * s_in + i, mask=i < n, other=0.0)
        better_ones = tl.zeros([BI, BJ], tl.float32)
        for start in range(0, n, BJ):
            other = tl.load(chosen + t * s_in + start + j, mask=start + j < n, other=float("nan"))
            earlier = (start + j)[None, :] < i[:, None]  # listed by position
            better = (other[None, :] > mine[:, None]) | ((other[None, :] == mine[:, None]) & earlier)
            better_ones += tl.where(better, 1.0, 0.0)
        rank = tl.sum(better_ones, axis=1)
        tl.store(out + t * s_out + rank.to(tl.int32), tl.load(positions + t * s_in + i, mask=i < n), mask=i < n)
