"""Lightning Indexer as Triton kernels: scores by pages, the level of each row's choice with its positions, in order.

Shaped for one core of a 910B/910C (64 KB L0A and L0B, 128 KB L0C, 192 KB UB), at GLM-5's 32 heads of 128:

    score_pages      [BT * H, D] x [D, PAGE]: 32 x 128 x 128 in decode, 64 x 128 x 128 where a request has several
                     tokens, which share its keys. A page is one run of memory. A program takes many pages in a loop
                     without a branch, which the device's compiler makes a pipeline: cube and vector cores take turns
                     over four workspaces. One program per core.
    list_positions   first the level of a row: its K-th score is found by counting floats (vector cores compare floats,
                     not integers), TILE = 4096 (16 KB) at a time, until exactly K reach it; no sort. A sample of the
                     row says where it lies; then by interpolation and halves. Hits are added lane by lane in fp16. Four
                     tiles of a row stay in UB, if it has no more. Then 32 runs of 128 positions: the smallest position
                     left of each run at once, as often as the fullest run has some; [32, 128] in fp16 is 8 KB.
    join_positions   the runs one behind the other, one copy each, in parts, so that all vector cores have one.

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
    AT_ONCE: tl.constexpr,
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
    end = tl.minimum((part + 1) * pages, (last + PAGE - 1) // PAGE)
    for start in range(part * pages, end, AT_ONCE):
        for step in tl.static_range(AT_ONCE):
            page = start + step
            block = tl.load(block_table + request * s_table + tl.minimum(page, end - 1))
            there = tl.maximum(block, 0)
            keys = tl.load(k + there * s_kb + s[:, None] * s_ks + d[None, :])
            dots = tl.dot(queries, tl.trans(keys)).to(tl.float32)
            if INT8:
                dots = dots * weight_scale[:, None]
            weighted = tl.maximum(dots, 0.0, tl.PropagateNan.ALL) * weight[:, None]
            score = tl.sum(tl.reshape(weighted, (BT, H, PAGE)), axis=1)
            if INT8:
                score = score * tl.load(k_scale + there * PAGE + s).to(tl.float32)[None, :]
            column = page * PAGE + s
            score = tl.where(column[None, :] < seen[:, None], score, float("nan"))
            written = tl.where((page < end) & (block >= 0), count, 0)
            place = out + (first + token)[:, None] * s_out + column[None, :]
            tl.store(place, score, mask=(token < written)[:, None])


@triton.jit
def _number(key):
    """The float that is number `key` (int32) in ascending order; beyond the infinities there are NaNs."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _middle(low, high):
    return (low >> 1) + (high >> 1) + (low & high & 1)


@triton.jit
def _reaching(score, level):
    """1 where a score reaches the level, in fp16: half the work of fp32, and exact for lanes that count to 2048."""
    one = tl.full(score.shape, 1.0, tl.float16)
    return tl.where(score >= level, one, tl.zeros(score.shape, tl.float16))


@triton.jit
def _count(scores, begin, end, level, TILE: tl.constexpr):
    """How many of scores [begin] to [end] reach `level`."""
    i = tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.float16)
    for start in range(begin, end, TILE):
        total += _reaching(tl.load(scores + start + i, mask=start + i < end, other=float("nan")), level)
    return _total(tl.reshape(total.to(tl.float32), (TILE // 128, 128)))


@triton.jit
def _held(row, length, tile, TILE: tl.constexpr):
    i = tile * TILE + tl.arange(0, TILE)
    return tl.load(row + i, mask=i < length, other=float("nan"))


@triton.jit
def _reached(row, length, s0, s1, s2, s3, level, TILE: tl.constexpr, HELD: tl.constexpr):
    """How many of a row's scores reach `level`; HELD: they are the four tiles in UB."""
    if HELD:
        total = _reaching(s0, level) + _reaching(s1, level) + _reaching(s2, level) + _reaching(s3, level)
        found = _total(tl.reshape(total.to(tl.float32), (TILE // 128, 128)))
    else:
        found = _count(row, 0, length, level, TILE)
    return found


@triton.jit
def _total(lanes):
    """Their sum, by rows first: a tree of additions is quicker than the sum across lanes."""
    return tl.sum(tl.reduce(lanes, 0, _plus), axis=0)


@triton.jit
def _of_sample(sample, target, slack, low, high):
    """A key between `low` and `high` that about `target` of the sample reach."""
    key = low
    distance = slack + 1.0
    for _ in range(0, 32):
        if distance > slack:
            key = _middle(low, high)
            found = _total(tl.where(sample >= _number(key), 1.0, 0.0))
            low = tl.where(found >= target, key, low)
            high = tl.where(found >= target, high, key)
            distance = tl.abs(found - target)
    return key


@triton.jit
def _between(row, length, want, low, high, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Two keys between which the one lies that `want` of a row's scores reach, by a sample of the row: most likely."""
    r, c = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    sample = tl.load(row + r[:, None] * (length // ROWS) + c[None, :])
    share = want / length.to(tl.float32) * (ROWS * COLUMNS)
    slack = tl.sqrt(share) + 1.0
    under = _of_sample(sample, share + 2.5 * slack, slack, low, high)
    # Seldom more than four times as high; if it is, this is another try that fails.
    limit = tl.minimum(under, high - 16777216) + 16777216
    return under, _of_sample(sample, share - 2.5 * slack, slack, under, limit)


@triton.jit
def _share(reach, want, beyond):
    """How far from `low` to `high` to try: where a straight line puts `want`, and a little on, so that the nearer end
    of the two is left behind too."""
    drop, rise = reach - want, want - beyond
    more = 0.5 * tl.sqrt(drop * rise / (drop + rise))
    return (drop + tl.where(drop < rise, more, -more)) / (drop + rise)


@triton.jit
def _plus(a, b):
    return a + b


@triton.jit
def _lesser(a, b):
    return tl.minimum(a, b)


@triton.jit
def _level(row, length, topk, TILE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HELD: tl.constexpr):
    """(level, last): of a row's `length` scores the min(topk, those that are there) best, lowest position among equals,
    are those above `level`, and those that equal it at positions up to `last`. HELD: 4 tiles hold the row."""
    s0, s1, s2, s3 = 0.0, 0.0, 0.0, 0.0
    if HELD:
        s0, s1 = _held(row, length, 0, TILE), _held(row, length, 1, TILE)
        s2, s3 = _held(row, length, 2, TILE), _held(row, length, 3, TILE)
    # `reach` scores reach the float of key `low`, fewer than `want` that of `high`: `beyond`.
    low = tl.minimum(length, 0) - 2139095041
    high, beyond, want = -low, 0.0, topk * 1.0
    long = length >= 4 * ROWS * COLUMNS
    under, over, reach = low, low, beyond
    if long:
        under, over = _between(row, length, want, low, high, ROWS, COLUMNS)
        reach = _reached(row, length, s0, s1, s2, s3, _number(under), TILE, HELD)
    bracketed = long & (reach >= want)
    if bracketed:
        low = under
    else:  # short, the sample misleads, or fewer are there
        if long:
            high, beyond = tl.maximum(under, low + 1), reach
        reach = _reached(row, length, s0, s1, s2, s3, float("-inf"), TILE, HELD)
        want = tl.minimum(reach, want)
    for turn in range(0, 7):
        if (reach > want) & (_middle(low, high) > low):
            for step in range(8 * turn, 8 * turn + 8):
                middle = _middle(low, high)
                if (reach > want) & (middle > low):
                    half = ((high >> 1) - (low >> 1)).to(tl.float32)
                    tried = low + 2 * (half * _share(reach, want, beyond)).to(tl.int32)
                    tried = tl.where(long & (step < 24) & (step % 8 != 7), tried, middle)
                    tried = tl.where(bracketed & (step == 0), over, tried)
                    tried = tl.minimum(tl.maximum(tried, low + 1), high - 1)
                    found = _reached(row, length, s0, s1, s2, s3, _number(tried), TILE, HELD)
                    enough = found >= want
                    low, high = tl.where(enough, tried, low), tl.where(enough, high, tried)
                    reach, beyond = tl.where(enough, found, reach), tl.where(enough, beyond, found)
    level = _number(low)
    # Of those that equal the level the first ones, up to position `last`.
    last = length
    if reach > want:
        above = _number(low + 1)
        need = want - _count(row, 0, length, above, TILE)
        last = 0
        for bit in range(0, 31):
            tried = last | (1 << (30 - bit))
            if tried < length:
                # positions below `tried` hold too few: the cut lies at or after it
                equal = _count(row, 0, tried, level, TILE) - _count(row, 0, tried, above, TILE)
                last = tl.where(equal < need, tried, last)
    return level, last


@triton.jit
def list_positions(
    scores, visible, runs, numbers, s_scores, s_numbers, topk, step,
    TILE: tl.constexpr, SAMPLE_ROWS: tl.constexpr, SAMPLE_COLUMNS: tl.constexpr, HELD: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Grid (T, S / step), step a multiple of ROWS * COLUMNS. Of each run of COLUMNS positions of scores fp32 [T, S]
    those among the row's min(topk, those that are there) best, lowest position among equals, in order, to its place in
    runs int32 [T, S], and their number to numbers int32 [T, S / COLUMNS]. All programs of a row find its level: cores
    that would wait for one another otherwise, and a launch less."""
    t, part = tl.program_id(0), tl.program_id(1)
    row, length = scores + t * s_scores, tl.load(visible + t)
    begin, end = part * step, tl.minimum((part + 1) * step, length)
    if begin < end:
        level, last = _level(row, length, topk, TILE, SAMPLE_ROWS, SAMPLE_COLUMNS, HELD)
        key = level.to(tl.int32, bitcast=True)
        above = _number((key ^ ((key >> 31) & 0x7FFFFFFF)) + 1)
        for start in range(begin, end, ROWS * COLUMNS):
            _list_tile(
                row, runs + t * s_scores, numbers + t * s_numbers, start, level, last, above, ROWS, COLUMNS, SLOTS
            )


@triton.jit
def _list_tile(
    row, runs, numbers, start, level, last, above,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """ROWS runs of a row from position `start`: their chosen positions and numbers."""
    r, c, slot = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, SLOTS)
    place = r[:, None] * COLUMNS + c[None, :]
    column = tl.broadcast_to(c[None, :], (ROWS, COLUMNS)).to(tl.float16)
    none = tl.full([ROWS, COLUMNS], 2048.0, tl.float16)
    score = tl.load(row + start + place)
    limit = tl.where(place.to(tl.float32) <= (last - start).to(tl.float32), level, above)
    left = tl.where(score >= limit, column, none)
    number = tl.sum(_reaching(score, limit).to(tl.float32), axis=1).to(tl.int32)
    tl.store(numbers + start // COLUMNS + r, number)
    most = tl.max(number, axis=0)
    for first in range(0, most, SLOTS):
        found = tl.zeros([ROWS, SLOTS], tl.float16)
        turn = tl.broadcast_to(slot[None, :], (ROWS, SLOTS)).to(tl.float16)
        before = tl.full([ROWS, SLOTS], -0.5, tl.float16)  # a scalar would be compared in fp32
        for _ in range(0, tl.minimum(SLOTS, most - first)):
            least = tl.reduce(left, 1, _lesser)
            found = tl.where(turn > before, least[:, None], found)  # and in later slots, until theirs come
            turn -= 1.0
            left = tl.where(left > least[:, None], left, none)
        position = start + (r * COLUMNS)[:, None] + found.to(tl.int32)
        tl.store(runs + start + (r * COLUMNS)[:, None] + first + slot[None, :], position)


@triton.jit
def join_positions(
    visible, runs, numbers, out, s_scores, s_numbers, s_out, step,
    TILE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid (T, S / COLUMNS / step). What `list_positions` has listed, run by run, in out int32 [T, topk]."""
    t, part = tl.program_id(0), tl.program_id(1)
    end = (tl.load(visible + t) + COLUMNS - 1) // COLUMNS
    i, c = tl.arange(0, TILE), tl.arange(0, COLUMNS)
    before = tl.zeros([TILE], tl.float32)
    for start in range(0, tl.minimum(part * step, end), TILE):
        inside = start + i < part * step
        before += tl.load(numbers + t * s_numbers + start + i, mask=inside, other=0).to(tl.float32)
    at = tl.sum(before, axis=0).to(tl.int32)
    for run in range(part * step, tl.minimum((part + 1) * step, end)):
        number = tl.load(numbers + t * s_numbers + run)
        if number > 0:
            listed = tl.load(runs + t * s_scores + run * COLUMNS + c)
            tl.store(out + t * s_out + at + c, listed, mask=c < number)
            at += number
