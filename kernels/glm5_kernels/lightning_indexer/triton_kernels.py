"""Lightning Indexer as Triton kernels: scores by pages, the choice of each row, its order.

Shaped for one core of a 910B/910C (64 KB L0A and L0B, 128 KB L0C, 192 KB UB), at GLM-5's 32 heads of 128:

    score_pages      [BT * H, D] x [D, PAGE] = 128 x 128 x 128: 32 KB each for q and keys, so that both fit twice in
                     L0A and L0B, 64 KB of fp32 products in L0C; relu, weights and the sum over heads on the vector
                     cores, 64 KB. A page is one run of memory. Several query tokens of a request share its keys.
    choose_positions one row of scores, TILE = 2048 (8 KB) at a time: the K-th score is found bit by bit, by counting
                     floats (vector cores compare floats, not integers); no sort, no histogram. A row of 64k scores is
                     256 KB and is read from L2 once per bit. Then SCAN = 128 at a time to their places: a prefix sum as
                     a 128 x 128 comparison (64 KB), and stores one by one.
    order_positions  the rank of each of K positions by counting the better ones, 64 x 128 at a time (32 KB).

A score that is NaN means: not there.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def score_pages(
    q, k, weights, q_scale, k_scale, block_table, groups, visible, out,
    s_kb, s_ks, s_table, s_out,
    H: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, PAGE: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """Grid (groups, pages). groups int32 [G, 3]: first token, number of tokens <= BT, request. q [T, H, D] contiguous;
    k [num_blocks, PAGE, D]; weights and q_scale [T, H]; k_scale [num_blocks, PAGE]; out fp32 [T, S], S = pages * PAGE.
    """
    g, page = tl.program_id(0), tl.program_id(1)
    first, count, request = tl.load(groups + g * 3), tl.load(groups + g * 3 + 1), tl.load(groups + g * 3 + 2)
    block = tl.load(block_table + request * s_table + page)
    if (block >= 0) & (page * PAGE < tl.load(visible + first + count - 1)):
        row, d, s = tl.arange(0, BT * H), tl.arange(0, D), tl.arange(0, PAGE)
        asked = row < count * H
        queries = tl.load(q + (first * H + row)[:, None] * D + d[None, :], mask=asked[:, None], other=0)
        keys = tl.load(k + block * s_kb + s[:, None] * s_ks + d[None, :])
        dots = tl.dot(queries, tl.trans(keys)).to(tl.float32)
        if INT8:
            dots = dots * tl.load(q_scale + first * H + row, mask=asked, other=0.0).to(tl.float32)[:, None]
        weight = tl.load(weights + first * H + row, mask=asked, other=0.0).to(tl.float32)
        weighted = tl.maximum(dots, 0.0) * weight[:, None]
        score = tl.sum(tl.reshape(weighted, (BT, H, PAGE)), axis=1)
        if INT8:
            score = score * tl.load(k_scale + block * PAGE + s).to(tl.float32)[None, :]
        token = tl.arange(0, BT)
        seen = tl.load(visible + first + token, mask=token < count, other=0)
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
    total = 0.0
    for start in range(0, length, TILE):
        score = tl.load(scores + start + i, mask=start + i < length, other=float("nan"))
        if EQUAL:
            hit = (score == level) & (start + i <= last)
        else:
            hit = score >= level
        total += tl.sum(tl.where(hit, 1.0, 0.0), axis=0)
    return total


@triton.jit
def choose_positions(
    scores, visible, positions, chosen, number, s_scores, s_out, topk,
    TILE: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """Grid (T). The min(topk, scores that are there) best of scores [T, S] in order of position, lowest among equals:
    positions int32 [T, >= topk], their scores in chosen fp32, how many in number int32 [T]."""
    t = tl.program_id(0)
    row, length = scores + t * s_scores, tl.load(visible + t)
    there = _count(row, length, float("-inf"), 0, False, TILE)
    want = tl.minimum(there, topk * 1.0)
    # The largest float that `want` scores reach: its sign, then its other bits from the highest down.
    key = tl.where(_count(row, length, 0.0, 0, False, TILE) >= want, 0, -2147483648)
    for bit in range(0, 31):
        tried = key + (1 << (30 - bit))
        key = tl.where(_count(row, length, _number(tried), 0, False, TILE) >= want, tried, key)
    level = _number(key)
    level = tl.where(level == level, level, float("-inf"))
    # Of those that equal the level the first ones, up to position `last`.
    reach = _count(row, length, level, 0, False, TILE)
    equal = _count(row, length, level, length, True, TILE)
    need = want - (reach - equal)
    last = length
    if reach > want:
        last = 0
        for bit in range(0, 31):
            tried = last | (1 << (30 - bit))
            # positions below `tried` hold too few: the cut lies at or after it
            last = tl.where(_count(row, length, level, tried - 1, True, TILE) < need, tried, last)
    i = tl.arange(0, SCAN)
    base = 0
    for start in range(0, length, SCAN):
        score = tl.load(row + start + i, mask=start + i < length, other=float("nan"))
        taken = (score > level) | ((score == level) & (start + i <= last))
        one = tl.where(taken, 1.0, 0.0)
        if tl.max(one, axis=0) > 0:
            before = tl.sum(tl.where(i[:, None] < i[None, :], one[:, None], 0.0), axis=0).to(tl.int32)
            tl.store(positions + t * s_out + base + before, start + i, mask=taken)
            tl.store(chosen + t * s_out + base + before, score, mask=taken)
            base += tl.sum(one, axis=0).to(tl.int32)
    tl.store(number + t, base)


@triton.jit
def order_positions(positions, chosen, number, out, s_in, s_out, BI: tl.constexpr, BJ: tl.constexpr):
    """Grid (T, topk / BI). out int32 [T, topk]: positions by falling score, lowest position first among equals."""
    t, block = tl.program_id(0), tl.program_id(1)
    n = tl.load(number + t)
    if block * BI < n:
        i, j = block * BI + tl.arange(0, BI), tl.arange(0, BJ)
        mine = tl.load(chosen + t * s_in + i, mask=i < n, other=0.0)
        rank = tl.zeros([BI], tl.float32)
        for start in range(0, n, BJ):
            other = tl.load(chosen + t * s_in + start + j, mask=start + j < n, other=float("nan"))
            earlier = (start + j)[None, :] < i[:, None]  # listed by position
            better = (other[None, :] > mine[:, None]) | ((other[None, :] == mine[:, None]) & earlier)
            rank += tl.sum(tl.where(better, 1.0, 0.0), axis=1)
        tl.store(out + t * s_out + rank.to(tl.int32), tl.load(positions + t * s_in + i, mask=i < n), mask=i < n)
