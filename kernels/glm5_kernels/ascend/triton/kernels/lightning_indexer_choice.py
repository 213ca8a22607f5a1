"""Lightning Indexer's choice as a Triton kernel: the level of each row's K best scores, and their positions, in order.

Shaped for one vector core of a 910B/910C (192 KB UB):

    choose_positions first the level of a row: its K-th score is found by counting floats (vector cores compare floats,
                     not integers), TILE = 4096 (16 KB) at a time, until exactly K reach it. A sample of the
                     row says where it lies; then by interpolation and halves. Hits are added lane by lane in fp16. Four
                     tiles of a row stay in UB, if it has no more. Its hits are many: 8 runs of 512 positions, each
                     sorted, what was not hit behind. Else 32 runs of 128: the smallest position left of each at once,
                     as often as the fullest has some; [32, 128] in fp16 is 8 KB. At last the runs one behind the other,
                     one copy each.

A score that is NaN means: not there.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _number(key):
    """The float that is number `key` (int32) in ascending order; beyond the infinities there are NaNs."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _key(number):
    bits = number.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _middle(low, high):
    return (low >> 1) + (high >> 1) + (low & high & 1)


@triton.jit
def _plus(a, b):
    return a + b


@triton.jit
def _lesser(a, b):
    return tl.minimum(a, b)


@triton.jit
def _total(lanes):
    """Their sum, by rows first: a tree of additions is quicker than the sum across lanes."""
    return tl.sum(tl.reduce(lanes, 0, _plus), axis=0)


@triton.jit
def _reaching(score, level):
    """1 where a score reaches the level, in fp16: half the work of fp32, and exact for lanes that count to 2048."""
    one = tl.full(score.shape, 1.0, tl.float16)
    return tl.where(score >= level, one, tl.zeros(score.shape, tl.float16))


@triton.jit
def _count(row, begin, end, level, TILE: tl.constexpr):
    """How many of a row's scores [begin] to [end] reach `level`."""
    i = tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.float16)
    for start in range(begin, end, TILE):
        total += _reaching(tl.load(row + start + i, mask=start + i < end, other=float("nan")), level)
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
def _guess(sample, share, SIZE: tl.constexpr):
    """(under, leap): the key that somewhat more than `share` of the sample reach, and how far above it, in units of two
    keys, somewhat fewer do. Both are guesses: the row is counted."""
    slack = tl.sqrt(share) + 1.0
    target = share + 2.5 * slack
    mean = _total(tl.where(sample >= float("-inf"), sample, 0.0)) / SIZE
    apart = tl.where(sample >= float("-inf"), sample - mean, 0.0)
    spread = tl.sqrt(_total(apart * apart) / SIZE)
    # No distribution has this much of it further from its mean (Cantelli). Of infinities halve the keys of all floats.
    odds = tl.sqrt((SIZE - target) / target)
    finite = (spread < 1e30) & (tl.abs(mean) < 1e30)
    low = tl.where(finite, mean - spread / odds, float("-inf"))
    high = tl.where(finite, mean + spread * odds, 3e38)
    reach, beyond, distance, tried = SIZE * 1.0, 0.0, slack + 1.0, low
    for _ in range(0, 32):
        if distance > slack:
            tried = tl.where(finite, 0.5 * low + 0.5 * high, _number(_middle(_key(low), _key(high))))
            found = _total(tl.where(sample >= tried, 1.0, 0.0))
            distance = tl.abs(found - target)
            enough = found >= target
            low, high = tl.where(enough, tried, low), tl.where(enough, high, tried)
            reach, beyond = tl.where(enough, found, reach), tl.where(enough, beyond, found)
    beside = tried + 5.0 * slack * (high - low) / tl.maximum(reach - beyond, 1.0)
    under = _key(tried)
    return under, tl.maximum((_key(beside) >> 1) - (under >> 1), 1)


@triton.jit
def _share(reach, want, beyond):
    """How far from `low` to `high` to try: where a straight line puts `want`, and a little on, so that the nearer end
    of the two is left behind too."""
    drop, rise = reach - want, want - beyond
    inverse = 1.0 / (drop + rise)
    more = 0.5 * tl.sqrt(drop * rise * inverse)
    return (drop + tl.where(drop < rise, more, -more)) * inverse


@triton.jit
def _level(row, length, topk, TILE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HELD: tl.constexpr):
    """(level, last): of a row's `length` scores the min(topk, those that are there) best, lowest position among equals,
    are those above `level`, and those that equal it at positions up to `last`. HELD: 4 tiles hold the row."""
    r, c = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    sample = tl.load(row + r[:, None] * (length // ROWS) + c[None, :])
    s0, s1, s2, s3 = 0.0, 0.0, 0.0, 0.0
    if HELD:
        s0, s1 = _held(row, length, 0, TILE), _held(row, length, 1, TILE)
        s2, s3 = _held(row, length, 2, TILE), _held(row, length, 3, TILE)
    # `reach` scores reach the float of key `low`, fewer than `want` that of `high`: `beyond`, or -1 for not counted.
    low = tl.minimum(length, 0) - 2139095041
    high, beyond, want = -low, 0.0, topk * 1.0
    share = want / tl.maximum(length, 1).to(tl.float32) * (ROWS * COLUMNS)
    long = (length >= 2 * ROWS * COLUMNS) & (share < 0.75 * ROWS * COLUMNS)
    under, leap = low, 1
    if long:
        under, leap = _guess(sample, share, ROWS * COLUMNS)
    reach = _reached(row, length, s0, s1, s2, s3, _number(under), TILE, HELD)
    if long & (reach >= want):
        low, beyond = under, -1.0
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
                    half = (high >> 1) - (low >> 1)
                    between = (half.to(tl.float32) * _share(reach, want, beyond)).to(tl.int32)
                    tried = low + 2 * tl.where(beyond < 0.0, tl.minimum(leap, half), between)
                    tried = tl.where(long & (step < 24) & (step % 8 != 7), tried, middle)
                    tried = tl.minimum(tl.maximum(tried, low + 1), high - 1)
                    leap = tl.minimum(leap, 1 << 29) * 2
                    found = _reached(row, length, s0, s1, s2, s3, _number(tried), TILE, HELD)
                    enough = found >= want
                    low, high = tl.where(enough, tried, low), tl.where(enough, high, tried)
                    reach, beyond = tl.where(enough, found, reach), tl.where(enough, beyond, found)
    last = length
    if reach > want:
        last = _cut(row, length, want, _number(low), _number(low + 1), TILE)
    return _number(low), last


@triton.jit
def _cut(row, length, want, level, above, TILE: tl.constexpr):
    """The position up to which scores that equal `level` are chosen: the first ones."""
    need = want - _count(row, 0, length, above, TILE)
    last = tl.minimum(length, 0)
    for bit in range(0, 31):
        tried = last | (1 << (30 - bit))
        if tried < length:
            # positions below `tried` hold too few: the cut lies at or after it
            equal = _count(row, 0, tried, level, TILE) - _count(row, 0, tried, above, TILE)
            last = tl.where(equal < need, tried, last)
    return last


@triton.jit
def choose_positions(
    scores, visible, runs, numbers, out, out1, out2, out3, s_scores, s_numbers, s_out, topk, step,
    TILE: tl.constexpr, SAMPLE_ROWS: tl.constexpr, SAMPLE_COLUMNS: tl.constexpr, HELD: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Grid (T, S / step), step a multiple of ROWS * COLUMNS. Positions of a row's min(topk, those that are there) best
    scores fp32 [T, S], lowest position among equals, ascending, to out int32 [T, topk], which out1, out2 and out3 are,
    too: copies to one tensor would wait for each other. A program's lists lie in runs int32 [T, S], their lengths in
    numbers int32 [T, S / COLUMNS], read after they were written, never before. All programs of a row find its level and
    count what earlier ones choose, since none can wait for another."""
    t, part = tl.program_id(0), tl.program_id(1)
    row, length = scores + t * s_scores, tl.load(visible + t)
    begin, end = part * step, tl.minimum((part + 1) * step, length)
    if begin < end:
        c = tl.arange(0, COLUMNS)
        level, last = _level(row, length, topk, TILE, SAMPLE_ROWS, SAMPLE_COLUMNS, HELD)
        above = _number(_key(level) + 1)
        lists, counts = runs + t * s_scores, numbers + t * s_numbers
        for start in range(begin, end, ROWS * COLUMNS):
            _list_tile(row, length, lists, counts, start, level, last, above, ROWS, COLUMNS, SLOTS, HELD)
        before = _count(row, 0, tl.minimum(begin, last + 1), level, TILE)
        if last + 1 < begin:
            before += _count(row, last + 1, begin, above, TILE)
        at = before.to(tl.int32)
        for first in range(begin // COLUMNS, (end + COLUMNS - 1) // COLUMNS, 4):
            place, to = lists + first * COLUMNS + c, t * s_out + at + c
            n0, n1 = tl.load(counts + first), tl.load(counts + first + 1)
            n2, n3 = tl.load(counts + first + 2), tl.load(counts + first + 3)
            l0, l1 = tl.load(place), tl.load(place + COLUMNS)
            l2, l3 = tl.load(place + 2 * COLUMNS), tl.load(place + 3 * COLUMNS)
            tl.store(out + to, l0, mask=c < n0)
            tl.store(out1 + to + n0, l1, mask=c < n1)
            tl.store(out2 + to + n0 + n1, l2, mask=c < n2)
            tl.store(out3 + to + n0 + n1 + n2, l3, mask=c < n3)
            at += n0 + n1 + n2 + n3


@triton.jit
def _list_tile(
    row, length, lists, counts, start, level, last, above,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SLOTS: tl.constexpr, SORTED: tl.constexpr,
):  # fmt: skip
    """Chosen positions of ROWS runs from position `start`: in order, each to its place in lists; numbers to counts.
    SORTED: by a sort, which takes as long whatever is chosen; else SLOTS of each run at a time."""
    r, c = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    place = r[:, None] * COLUMNS + c[None, :]
    column = tl.broadcast_to(c[None, :], (ROWS, COLUMNS)).to(tl.float16)
    none = tl.full([ROWS, COLUMNS], 2048.0, tl.float16)
    score = tl.reshape(_held(row, length, start // (ROWS * COLUMNS), ROWS * COLUMNS), (ROWS, COLUMNS))
    left = tl.where(score >= tl.where(last < start, above, level), column, none)
    if (start <= last) & (last < start + ROWS * COLUMNS - 1):  # of equals only those up to `last`
        limit = tl.where(place.to(tl.float32) <= (last - start).to(tl.float32), level, above)
        left = tl.where(score >= limit, column, none)
    hit = tl.where(left < none, tl.full([ROWS, COLUMNS], 1.0, tl.float16), tl.zeros([ROWS, COLUMNS], tl.float16))
    number = tl.sum(hit.to(tl.float32), axis=1).to(tl.int32)
    tl.store(counts + start // COLUMNS + r, number)
    if SORTED:
        tl.store(lists + start + place, start + (r * COLUMNS)[:, None] + tl.sort(left, 1).to(tl.int32))
    else:
        _take_out(lists, start, left, none, tl.max(number, axis=0), ROWS, COLUMNS, SLOTS)


@triton.jit
def _take_out(lists, start, left, none, most, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SLOTS: tl.constexpr):
    """The positions in `left`, the smallest of each run first, to lists: `most` of a run."""
    r, slot = tl.arange(0, ROWS), tl.arange(0, SLOTS)
    for first in range(0, most, SLOTS):
        found = tl.zeros([ROWS, SLOTS], tl.float16)
        turn = tl.broadcast_to(slot[None, :], (ROWS, SLOTS)).to(tl.float16)
        before = tl.full([ROWS, SLOTS], -0.5, tl.float16)  # a scalar would be compared in fp32
        for _ in range(0, tl.minimum(SLOTS, most - first)):
            least = tl.reduce(left, 1, _lesser)
            found = tl.where(turn > before, least[:, None], found)  # and in later slots, until theirs come
            left = tl.where(left > least[:, None], left, none)
            turn -= 1.0
        position = start + (r * COLUMNS)[:, None] + found.to(tl.int32)
        tl.store(lists + start + (r * COLUMNS)[:, None] + first + slot[None, :], position)
