"""The inner loop of the Lightning Indexer on rounded operands: about the scores of a few keys for one query token."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import int64, types
from numba.extending import intrinsic

from glm5_kernels.compiled.rows import prefetch_line
from glm5_kernels.compiled.simd import (
    GROUPS,
    I32,
    STEP,
    UNROLLED,
    V16,
    WIDTH,
    Lanes,
    for_range,
    i64_const,
    returns_void,
    sum_each,
)
from glm5_kernels.compiled.words import WORDS, add_words

#: Keys of a tile.
TILE = WORDS.rows if WORDS else 8


@intrinsic  # type: ignore[untyped-decorator]
def scores_of_words(
    _: Any,
    keys: Any,
    query: Any,
    weights: Any,
    blocks: Any,
    pairs: Any,
    factors: Any,
    out: Any,
    ahead: Any,
    stride: Any,
) -> Any:
    """out fp32 [TILE] <- for each key, factor * the sum over heads of weights[h] * relu(query[:, h] . key).

    keys: int16 [TILE, 2 * pairs]; query [blocks, pairs, STEP], two int16 per lane: the heads by blocks of STEP lanes;
    weights fp32 [blocks * STEP]; factors fp32 [TILE]; pairs a multiple of UNROLLED. Sums are int32 and must fit.

    It prefetches as `scores_of_keys` does.
    """

    def generate(builder: Any, arguments: Any) -> None:
        keys, query, weights, blocks, pairs, factors, out, ahead, stride = arguments
        v, integers, zero = Lanes(builder), ir.VectorType(I32, WIDTH), Lanes(builder).constant(0.0)
        starts = [builder.add(keys, builder.mul(pairs, i64_const(4 * key))) for key in range(TILE)]
        scores = [v.variable(0.0) for _ in starts]
        sums = [[v.variable(0.0) for _ in range(GROUPS)] for _ in starts]
        with for_range(builder, blocks) as block:
            for total in (total for row in sums for total in row):
                builder.store(zero, total)
            with for_range(builder, builder.sdiv(pairs, i64_const(UNROLLED))) as part:
                begin = builder.mul(part, i64_const(UNROLLED))
                done = builder.add(builder.mul(block, pairs), begin)
                for number in range(UNROLLED):
                    if number % (UNROLLED // GROUPS) == 0:
                        line = builder.mul(stride, builder.add(done, i64_const(number)))
                        prefetch_line(builder, builder.add(ahead, line))
                    place = builder.mul(builder.add(done, i64_const(number)), i64_const(STEP))
                    columns = [v.load(query, builder.add(place, i64_const(WIDTH * g))) for g in range(GROUPS)]
                    for start, row in zip(starts, sums, strict=True):
                        pair = v.broadcast(v.load_scalar(start, builder.add(begin, i64_const(number))))
                        for total, column in zip(row, columns, strict=True):
                            builder.store(add_words(v, pair, column, builder.load(total)), total)
            for g in range(GROUPS):
                w = v.load(weights, builder.add(builder.mul(block, i64_const(STEP)), i64_const(WIDTH * g)))
                for score, row in zip(scores, sums, strict=True):
                    total = builder.sitofp(builder.bitcast(builder.load(row[g]), integers), V16)
                    builder.store(v.add_products(w, v.larger(total, zero), builder.load(score)), score)
        _store_products(v, [builder.load(score) for score in scores], factors, out)

    return types.void(*[int64] * 9), returns_void(generate)


def _store_products(v: Lanes, rows: list[Any], factors: Any, out: Any) -> None:
    """out[i] <- factors[i] * the sum of the lanes of rows[i]."""
    builder, count = v.builder, len(rows)
    whole = sum_each(v, [*rows, *rows[:1] * (-count % 2 ** (count - 1).bit_length())])
    sums = builder.shuffle_vector(whole, whole, ir.Constant(ir.VectorType(I32, count), list(range(count))))
    factor = builder.load(builder.inttoptr(factors, sums.type.as_pointer()))
    factor.align = 4
    builder.store(builder.fmul(sums, factor), builder.inttoptr(out, sums.type.as_pointer())).align = 4
