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

#: Keys whose sums are held in registers, with GROUPS lane groups of heads.
KEYS = HEADS


def _scores(add: Callable[..., Any], groups: int = GROUPS) -> Any:
    """The intrinsic out[0:KEYS] <- for each key, the sum over heads of weights[h] * relu(query[:, h] . key).

    Every dot product adds its dims in order; every score adds the heads of a lane in order, then the groups, then the
    lanes as `sum_each` does: no bit depends on the other keys and tokens of the call.

    Arguments of the intrinsic (int64; elements have 32 bits, fp32 or, where `add` is `Lanes.add_pairs`, two bf16):
        rows: address of the addresses of KEYS keys [dims]; dims is a multiple of UNROLLED.
        query: [blocks, dims, STEP], the heads in blocks of STEP lanes; the first `groups` lane groups of a block count.
        weights: [blocks * STEP], of which the first `heads` count.
        out: fp32 [KEYS].
        token_pitch: 0, or the bytes from one token's scores to the next one's; then each lane group of the one block
            is another token with `heads` heads.
        prefetch: memory to prefetch, `stride` bytes further with every dim of every block: a few lines at a time,
            because a core tracks only ten or so outstanding lines.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def scores_of_keys(
        _: Any, rows: Any, query: Any, weights: Any, heads: Any, blocks: Any, dims: Any, out: Any, token_pitch: Any,
        prefetch: Any, stride: Any,
    ) -> Any:  # fmt: skip
        def generate(builder: Any, arguments: Any) -> None:
            rows, query, weights, heads, blocks, dims, out, token_pitch, prefetch, stride = arguments
            v, table = Lanes(builder), builder.inttoptr(rows, I64.as_pointer())
            keys = [builder.load(builder.gep(table, [i64_const(key)])) for key in range(KEYS)]
            one_token = builder.icmp_signed("==", token_pitch, i64_const(0))
            scores = [[v.variable(0.0) for _ in range(KEYS)] for _ in range(groups)]
            sums = [[v.variable(0.0) for _ in range(groups)] for _ in range(KEYS)]
            with for_range(builder, blocks) as block:
                _add_dots(v, add, sums, keys, query, builder.mul(block, dims), dims, (prefetch, stride))
                for g in range(groups):
                    first = builder.add(builder.mul(block, i64_const(STEP)), i64_const(WIDTH * g))
                    is_head = _lanes_below(builder, builder.select(one_token, builder.sub(heads, first), heads))
                    _add_weighted(v, scores[g], [row[g] for row in sums], v.load(weights, first), is_head)
            loaded = [[builder.load(score) for score in row] for row in scores]
            with builder.if_else(one_token) as (one, several):
                with one:
                    _store_sums(v, [functools.reduce(builder.fadd, key) for key in zip(*loaded, strict=True)], out)
                with several:
                    for g, row in enumerate(loaded):
                        _store_sums(v, row, builder.add(out, builder.mul(token_pitch, i64_const(g))))

        return types.void(*[int64] * 10), returns_void(generate)

    return scores_of_keys


def _add_dots(
    v: Lanes, add: Callable[..., Any], sums: list[list[Any]], keys: list[Any], query: Any, first_row: Any, dims: Any,
    prefetch: tuple[Any, Any],
) -> None:  # fmt: skip
    """sums[key][group] <- the dot products of a block of the query, whose rows begin at `first_row`, with the keys."""
    builder, (prefetch_base, stride) = v.builder, prefetch
    for total in (total for row in sums for total in row):
        builder.store(v.constant(0.0), total)
    with for_range(builder, builder.sdiv(dims, i64_const(UNROLLED))) as step:
        first_dim = builder.mul(step, i64_const(UNROLLED))
        for number in range(UNROLLED):
            dim = builder.add(first_dim, i64_const(number))
            row = builder.add(first_row, dim)
            if number % 2 == 0:
                prefetch_line(builder, builder.add(prefetch_base, builder.mul(stride, row)))
            offset = builder.mul(row, i64_const(STEP))
            columns = [v.load(query, builder.add(offset, i64_const(WIDTH * g))) for g in range(len(sums[0]))]
            for key, totals in zip(keys, sums, strict=True):
                element = v.broadcast(v.load_scalar(key, dim))
                for total, column in zip(totals, columns, strict=True):
                    builder.store(add(v, element, column, builder.load(total)), total)


def _add_weighted(v: Lanes, scores: list[Any], dots: list[Any], weights: Any, is_head: Any) -> None:
    """scores[key] += weights * relu(dots[key]) in the lanes of heads."""
    builder, zero = v.builder, v.constant(0.0)
    for score, dot in zip(scores, dots, strict=True):
        positive = v.larger(zero, builder.load(dot))  # NaN stays
        positive = builder.select(is_head, positive, zero)  # padding: 0 * inf would be NaN
        builder.store(v.add_products(weights, positive, builder.load(score)), score)


def _store_sums(v: Lanes, rows: list[Any], out: Any) -> None:
    """out[i] <- the sum of the lanes of rows[i]."""
    sums = sum_each(v, rows)
    v.builder.store(sums, v.builder.inttoptr(out, sums.type.as_pointer())).align = 4


def _lanes_below(builder: Any, count: Any) -> Any:
    """A mask of the first `count` (int64) lanes."""
    numbers = ir.Constant(ir.VectorType(I32, WIDTH), list(range(WIDTH)))
    return builder.icmp_signed("<", numbers, Lanes(builder).broadcast(builder.trunc(count, I32)))


scores_of_keys, scores_of_pairs = _scores(Lanes.add_products), _scores(Lanes.add_pairs)
#: For one token whose heads fit one lane group.
scores_of_pairs_of_one_group = _scores(Lanes.add_pairs, 1)
