"""The inner loop of the Lightning Indexer: the scores of a few lane groups of keys for one query token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import int64, types
from numba.extending import intrinsic

from glm5_kernels.compiled.rows import prefetch_line
from glm5_kernels.compiled.simd import GROUPS, HEADS, STEP, UNROLLED, WIDTH, Lanes, for_range, i64_const, returns_void


def _scores(add: Callable[..., Any]) -> Any:
    """The intrinsic out[0:STEP] <- sum over heads of weights[h] * relu(query[h, :] . keys[:, lane]).

    keys [dims, STEP], transposed; query [heads, dims]; heads a multiple of HEADS, of which the first `real` count; dims
    of UNROLLED; 32 bits each, fp32 or, where `add` is `Lanes.add_pairs`, two bf16. Every dot product adds its dims in
    order, every score its heads: the tile's shape changes no bit.

    It prefetches the memory from `ahead` on, `stride` bytes further with every dim of every HEADS heads: a few lines at
    a time, because a core tracks only ten or so outstanding lines.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def tile_scores(
        _: Any, keys: Any, query: Any, weights: Any, heads: Any, real: Any, dims: Any, out: Any, ahead: Any, stride: Any
    ) -> Any:
        def generate(builder: Any, arguments: Any) -> None:
            keys, query, weights, heads, real, dims, out, ahead, stride = arguments
            v = Lanes(builder)
            zero, scores = v.constant(0.0), [v.variable(0.0) for _ in range(GROUPS)]
            sums = [[v.variable(0.0) for _ in range(GROUPS)] for _ in range(HEADS)]
            with for_range(builder, builder.sdiv(heads, i64_const(HEADS))) as block:
                first = builder.mul(block, i64_const(HEADS))
                for row in sums:
                    for total in row:
                        builder.store(zero, total)
                with for_range(builder, builder.sdiv(dims, i64_const(UNROLLED))) as part:
                    begin = builder.mul(part, i64_const(UNROLLED))
                    done = builder.add(builder.mul(block, dims), begin)
                    prefetch_line(builder, builder.add(ahead, builder.mul(stride, done)))
                    for number in range(UNROLLED):
                        d = builder.add(begin, i64_const(number))
                        place = builder.mul(d, i64_const(STEP))
                        columns = [v.load(keys, builder.add(place, i64_const(WIDTH * g))) for g in range(GROUPS)]
                        for h, row in enumerate(sums):
                            at = builder.add(builder.mul(builder.add(first, i64_const(h)), dims), d)
                            q = v.broadcast(v.load_scalar(query, at))
                            for total, column in zip(row, columns, strict=True):
                                builder.store(add(v, q, column, builder.load(total)), total)
                for h, row in enumerate(sums):
                    head = builder.add(first, i64_const(h))
                    w, is_real = v.broadcast(v.load_scalar(weights, head)), builder.icmp_signed("<", head, real)
                    for score, total in zip(scores, row, strict=True):
                        positive = v.larger(zero, builder.load(total))  # NaN stays
                        positive = builder.select(is_real, positive, zero)  # 0 * inf of a head that pads is NaN
                        builder.store(v.add_products(w, positive, builder.load(score)), score)
            for g, score in enumerate(scores):
                v.store(builder.load(score), out, i64_const(WIDTH * g))

        return types.void(*[int64] * 9), returns_void(generate)

    return tile_scores


tile_scores, tile_scores_of_pairs = _scores(Lanes.add_products), _scores(Lanes.add_pairs)
