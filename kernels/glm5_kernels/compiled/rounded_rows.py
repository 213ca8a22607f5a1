"""Rows of a cache, wherever they lie, rounded to int16 with a scale each."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import int64, types
from numba.core import cgutils
from numba.extending import intrinsic

from glm5_kernels.compiled.simd import (
    F32,
    I32,
    I64,
    WIDTH,
    Lanes,
    for_range,
    i64_const,
    returns_void,
    sum_each,
)

_WORDS = ir.VectorType(I32, WIDTH)
#: Norm of a rounded row: no element is larger then, and no sum of products of two rows leaves int32.
NORM = 32700.0
#: Squared norms between which a row is rounded relative to its norm. Smaller rows count as one of SMALLEST.
SMALLEST, LARGEST = 1e-30, 1e24
#: Rows rounded together.
ROUNDED = 8
#: Added to a number of less than 2**22, it leaves the nearest integer in the lower bits.
_TO_INTEGER = 1.5 * 2**23


@intrinsic  # type: ignore[untyped-decorator]
def round_rows(_: Any, rows: Any, dims: Any, out: Any, factors: Any) -> Any:
    """out int16 [ROUNDED, dims], factors fp32 [ROUNDED] <- rows of bf16: each element about factor * int16.

    rows: address of the rows' addresses; dims a multiple of 2 * WIDTH. An element is wrong by half a factor at most;
    NORM * factor is the row's norm, or the root of SMALLEST. A row beyond LARGEST, or not finite, has the factor NaN.
    """

    def generate(builder: Any, arguments: Any) -> None:
        rows, dims, out, factors = arguments
        v, table = Lanes(builder), builder.inttoptr(rows, I64.as_pointer())
        steps = builder.sdiv(dims, i64_const(2 * WIDTH))
        sums = [v.variable(0.0) for _ in range(ROUNDED)]
        for row, total in enumerate(sums):
            start = builder.load(builder.gep(table, [i64_const(row)]))
            with for_range(builder, steps) as step:
                for half in _load_pairs(v, start, step):
                    builder.store(v.add_products(half, half, builder.load(total)), total)
        scales = cgutils.alloca_once(builder, ir.VectorType(F32, ROUNDED))
        builder.store(_scales(v, sum_each(v, [builder.load(total) for total in sums]), factors), scales)
        scales = builder.bitcast(scales, F32.as_pointer())
        with for_range(builder, i64_const(ROUNDED)) as row:
            start = builder.load(builder.gep(table, [row]))
            scale = v.broadcast(builder.load(builder.gep(scales, [row])))
            with for_range(builder, steps) as step:
                halves = [v.add_products(half, scale, v.constant(_TO_INTEGER)) for half in _load_pairs(v, start, step)]
                place = builder.add(builder.mul(dims, row), builder.mul(step, i64_const(2 * WIDTH)))
                _store_pairs(v, halves, builder.add(out, builder.mul(place, i64_const(2))))

    return types.void(*[int64] * 4), returns_void(generate)


def _scales(v: Lanes, squares: Any, factors: Any) -> Any:
    """What to multiply rows with, from their squared norms; factors <- what to multiply the int16 with."""
    builder, kind = v.builder, squares.type

    def all_(value: float) -> Any:
        return ir.Constant(kind, [float(np.float32(value))] * kind.count)

    fits = builder.fcmp_ordered("<=", squares, all_(LARGEST))
    small = builder.fcmp_ordered("<", squares, all_(SMALLEST))
    root = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind]), f"llvm.sqrt.v{kind.count}f32")
    norms = builder.call(root, [builder.select(small, all_(SMALLEST), squares)])
    factor = builder.select(fits, builder.fmul(norms, all_(1 / NORM)), all_(math.nan))
    builder.store(factor, builder.inttoptr(factors, kind.as_pointer())).align = 4
    return builder.select(fits, builder.fdiv(all_(NORM), norms), all_(0.0))


def _load_pairs(v: Lanes, start: Any, step: Any) -> list[Any]:
    """32 bf16: those of even and those of odd number."""
    pairs = v.load(start, v.builder.mul(step, i64_const(WIDTH)))
    pairs.align = 2
    odd, even = v.halves(pairs)
    return [even, odd]


def _store_pairs(v: Lanes, halves: list[Any], address: Any) -> None:
    builder = v.builder
    even, odd = (builder.bitcast(half, _WORDS) for half in halves)
    even = builder.and_(even, ir.Constant(_WORDS, [0xFFFF] * WIDTH))
    both = builder.or_(even, builder.shl(odd, ir.Constant(_WORDS, [16] * WIDTH)))
    builder.store(both, builder.inttoptr(address, _WORDS.as_pointer())).align = 2
