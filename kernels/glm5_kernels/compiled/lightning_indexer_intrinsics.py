"""The inner loop of the Lightning Indexer: the scores of a few keys for one query token, a lane for each head."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import int64, types
from numba.extending import intrinsic

from glm5_kernels.compiled.rows import prefetch_line
from glm5_kernels.compiled.simd import (
    GROUPS,
    HEADS,
    I32,
    I64,
    STEP,
    UNROLLED,
    WIDTH,
    Lanes,
    for_range,
    i64_const,
    returns_void,
    sum_each,
)

#: Keys whose sums are held in registers, beside GROUPS lane groups of heads.
KEYS = HEADS


def _scores(add: Callable[..., Any], groups: int = GROUPS) -> Any:
    """The intrinsic out[0:KEYS] <- for each key, the sum over heads of weights[h] * relu(query[:, h] . key).

    rows: address of the addresses of KEYS keys [dims]; query [blocks, dims, STEP]: the heads by blocks of STEP lanes,
    of which the first `real` count; weights [blocks * STEP]; dims a multiple of UNROLLED; elements of 32 bits, fp32 or,
    where `add` is `Lanes.add_pairs`, two bf16. Unless `apart` is 0, each lane group of the one block is another token
    with `real` heads, whose scores lie `apart` bytes behind those of the one before. Of each block the first `groups`
    lane groups are looked at.

    Every dot product adds its dims in order; every score adds the heads of a lane in order, then the groups, then the
    lanes as `sum_each` does: no bit depends on the keys and tokens beside it.

    It prefetches the memory from `ahead` on, `stride` bytes further with every dim of every block: a few lines at a
    time, because a core tracks only ten or so outstanding lines.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def scores_of_keys(
        _: Any, rows: Any, query: Any, weights: Any, real: Any, blocks: Any, dims: Any, out: Any, apart: Any,
        ahead: Any, stride: Any,
    ) -> Any:  # fmt: skip
        def generate(builder: Any, arguments: Any) -> None:
            rows, query, weights, real, blocks, dims, out, apart, ahead, stride = arguments
            v, table = Lanes(builder), builder.inttoptr(rows, I64.as_pointer())
            keys = [builder.load(builder.gep(table, [i64_const(key)])) for key in range(KEYS)]
            zero, alone = v.constant(0.0), builder.icmp_signed("==", apart, i64_const(0))
            scores = [[v.variable(0.0) for _ in range(KEYS)] for _ in range(groups)]
            sums = [[v.variable(0.0) for _ in range(groups)] for _ in range(KEYS)]
            with for_range(builder, blocks) as block:
                for total in (total for row in sums for total in row):
                    builder.store(zero, total)
                with for_range(builder, builder.sdiv(dims, i64_const(UNROLLED))) as part:
                    begin = builder.mul(part, i64_const(UNROLLED))
                    done = builder.add(builder.mul(block, dims), begin)
                    for number in range(UNROLLED):
                        if number % 2 == 0:
                            line = builder.mul(stride, builder.add(done, i64_const(number)))
                            prefetch_line(builder, builder.add(ahead, line))
                        place = builder.mul(builder.add(done, i64_const(number)), i64_const(STEP))
                        columns = [v.load(query, builder.add(place, i64_const(WIDTH * g))) for g in range(groups)]
                        for key, row in zip(keys, sums, strict=True):
                            element = v.broadcast(v.load_scalar(key, builder.add(begin, i64_const(number))))
                            for total, column in zip(row, columns, strict=True):
                                builder.store(add(v, element, column, builder.load(total)), total)
                for g in range(groups):
                    first = builder.add(builder.mul(block, i64_const(STEP)), i64_const(WIDTH * g))
                    w = v.load(weights, first)
                    is_real = _lanes_below(builder, builder.select(alone, builder.sub(real, first), real))
                    for score, row in zip(scores[g], sums, strict=True):
                        positive = v.larger(zero, builder.load(row[g]))  # NaN stays
                        positive = builder.select(is_real, positive, zero)  # 0 * inf of a head that pads is NaN
                        builder.store(v.add_products(w, positive, builder.load(score)), score)
            found = [[builder.load(score) for score in row] for row in scores]
            with builder.if_else(alone) as (together, separate):
                with together:
                    whole = [functools.reduce(builder.fadd, of_key) for of_key in zip(*found, strict=True)]
                    _store_sums(v, whole, out)
                with separate:
                    for g, of_keys in enumerate(found):
                        _store_sums(v, of_keys, builder.add(out, builder.mul(apart, i64_const(g))))

        return types.void(*[int64] * 10), returns_void(generate)

    return scores_of_keys


def _store_sums(v: Lanes, rows: list[Any], out: Any) -> None:
    """out[i] <- the sum of the lanes of rows[i]."""
    sums = sum_each(v, rows)
    v.builder.store(sums, v.builder.inttoptr(out, sums.type.as_pointer())).align = 4


def _lanes_below(builder: Any, count: Any) -> Any:
    """Lanes of one bit: whether the lane's number is less than `count` (int64)."""
    numbers = ir.Constant(ir.VectorType(I32, WIDTH), list(range(WIDTH)))
    return builder.icmp_signed("<", numbers, Lanes(builder).broadcast(builder.trunc(count, I32)))


scores_of_keys, scores_of_pairs = _scores(Lanes.add_products), _scores(Lanes.add_pairs)
#: For one token with as many heads as a lane group has lanes, or fewer.
scores_of_pairs_of_few = _scores(Lanes.add_pairs, 1)
