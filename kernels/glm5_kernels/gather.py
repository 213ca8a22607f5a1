"""Rows of a cache, wherever they lie, as fp32 tiles that a kernel can multiply with."""

from __future__ import annotations

from typing import Any

import torch
from llvmlite import ir
from numba import int64, types
from numba.extending import intrinsic

from glm5_kernels.simd import I32, I64, V16, WIDTH, Lanes, count, for_range, load_as_fp32, nothing, turn_sixteen

#: What elements a row may have, as the kernels' code for it.
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}


@intrinsic  # type: ignore[untyped-decorator]
def turn(_: Any, rows: Any, dims: Any, kind: Any, out: Any, pitch: Any) -> Any:
    """out[d, 0:16] <- element d of sixteen rows, whose addresses are the int64 at `rows`.

    `dims` is a multiple of 16, `pitch` the distance of out's rows in fp32; `kind` says what the elements are.
    """

    def generate(builder: Any, arguments: Any) -> None:
        rows, dims, kind, out, pitch = arguments
        v = Lanes(builder)
        table = builder.inttoptr(rows, I64.as_pointer())
        whole_pairs = builder.icmp_signed("==", builder.and_(dims, count(2 * WIDTH - 1)), count(0))
        with builder.if_else(builder.and_(builder.icmp_signed("==", kind, count(1)), whole_pairs)) as (bf16, other):
            with bf16:
                _turn_pairs(v, table, dims, out, pitch)
            with other:
                _turn_elements(v, table, dims, kind, out, pitch)

    return types.void(int64, int64, int64, int64, int64), nothing(generate)


def _turn_elements(v: Lanes, table: Any, dims: Any, kind: Any, out: Any, pitch: Any) -> None:
    builder = v.builder
    with for_range(builder, builder.sdiv(dims, count(WIDTH))) as block:
        start = builder.mul(block, count(WIDTH))
        loaded = [load_as_fp32(v, address, start, kind) for address in _addresses(builder, table)]
        for number, column in enumerate(turn_sixteen(v, loaded)):
            v.store(column, out, builder.mul(builder.add(start, count(number)), pitch))


def _turn_pairs(v: Lanes, table: Any, dims: Any, out: Any, pitch: Any) -> None:
    """bf16 two by two as one lane, which halves the shuffles; the upper half of a fp32 with the same bits is a bf16."""
    builder, words = v.builder, ir.VectorType(I32, WIDTH)
    with for_range(builder, builder.sdiv(dims, count(2 * WIDTH))) as block:
        start = builder.mul(block, count(WIDTH))
        loaded = [v.load(address, start) for address in _addresses(builder, table)]
        for pair in loaded:
            pair.align = 2  # a row of bf16 may start anywhere
        for number, pairs in enumerate(turn_sixteen(v, loaded)):
            bits = builder.bitcast(pairs, words)
            lower = builder.shl(bits, ir.Constant(words, [16] * WIDTH))
            upper = builder.and_(bits, ir.Constant(words, [0xFFFF0000] * WIDTH))
            for half, value in enumerate((lower, upper)):
                dim = builder.add(builder.shl(start, count(1)), count(2 * number + half))
                v.store(builder.bitcast(value, V16), out, builder.mul(dim, pitch))


def _addresses(builder: Any, table: Any) -> list[Any]:
    return [builder.load(builder.gep(table, [count(lane)])) for lane in range(WIDTH)]


@intrinsic  # type: ignore[untyped-decorator]
def widen(_: Any, row: Any, dims: Any, kind: Any, out: Any) -> Any:
    """out[0:dims] <- one row as fp32; `dims` is a multiple of 16, `kind` says what its elements are."""

    def generate(builder: Any, arguments: Any) -> None:
        row, dims, kind, out = arguments
        v = Lanes(builder)
        with for_range(builder, builder.sdiv(dims, count(WIDTH))) as block:
            start = builder.mul(block, count(WIDTH))
            v.store(load_as_fp32(v, row, start, kind), out, start)

    return types.void(int64, int64, int64, int64), nothing(generate)
