"""The inner loop of the Lightning Indexer: the scores of a few lane groups of keys for one query token."""

from __future__ import annotations

from typing import Any

from numba import int64, types
from numba.extending import intrinsic

from glm5_kernels.simd import GROUPS, HEADS, WIDTH, Lanes, count, for_range, nothing

#: Keys of a tile: what one call of `tile_scores` covers per lane group, times the groups of a tile.
TILE = 128


@intrinsic  # type: ignore[untyped-decorator]
def tile_scores(_: Any, keys: Any, query: Any, weights: Any, heads: Any, dims: Any, out: Any) -> Any:
    """out[0 : 16 GROUPS] <- sum over heads of weights[h] * relu(query[h, :] . keys[:, lane]).

    keys fp32 [dims, TILE] from the first lane on; query fp32 [heads, dims]; heads a multiple of HEADS. Every dot
    product adds its dims in order, every score its heads: the tile's shape changes no bit.
    """

    def generate(builder: Any, arguments: Any) -> None:
        keys, query, weights, heads, dims, out = arguments
        v = Lanes(builder)
        zero, scores = v.constant(0.0), [v.variable(0.0) for _ in range(GROUPS)]
        sums = [[v.variable(0.0) for _ in range(GROUPS)] for _ in range(HEADS)]
        with for_range(builder, builder.sdiv(heads, count(HEADS))) as block:
            first = builder.mul(block, count(HEADS))
            for row in sums:
                for total in row:
                    builder.store(zero, total)
            with for_range(builder, dims) as d:
                place = builder.mul(d, count(TILE))
                columns = [v.load(keys, builder.add(place, count(WIDTH * g))) for g in range(GROUPS)]
                for h, row in enumerate(sums):
                    at = builder.add(builder.mul(builder.add(first, count(h)), dims), d)
                    q = v.splat(v.number(query, at))
                    for total, column in zip(row, columns, strict=True):
                        builder.store(v.call("fmuladd", q, column, builder.load(total)), total)
            for h, row in enumerate(sums):
                w = v.splat(v.number(weights, builder.add(first, count(h))))
                for score, total in zip(scores, row, strict=True):
                    positive = v.call("maxnum", builder.load(total), zero)
                    builder.store(v.call("fmuladd", w, positive, builder.load(score)), score)
        for g, score in enumerate(scores):
            v.store(builder.load(score), out, count(WIDTH * g))

    return types.void(int64, int64, int64, int64, int64, int64), nothing(generate)
