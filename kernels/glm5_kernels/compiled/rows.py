"""Rows of a cache, wherever they lie, as fp32 tiles that a kernel can multiply with."""

from __future__ import annotations

from typing import Any

import llvmlite.binding
import torch
from llvmlite import ir
from numba import int64, types
from numba.core import cgutils
from numba.extending import intrinsic

from glm5_kernels.compiled.simd import (
    GROUPS,
    I32,
    I64,
    V16,
    WIDTH,
    Lanes,
    count,
    for_range,
    load_as_fp32,
    nothing,
    store_as,
    turn_sixteen,
)

#: What elements a row may have, as the kernels' code for it.
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
#: bf16 that stay two by two, as 32 bits that are moved like an fp32: what `Lanes.add_pairs` multiplies.
PAIRED = 4


def place(cache: torch.Tensor) -> tuple[int, int, int]:
    """Address, bytes from block to block and from row to row."""
    size = cache.element_size()
    return cache.data_ptr(), cache.stride(0) * size, cache.stride(1) * size


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
def widen(_: Any, row: Any, dims: Any, kind: Any, out: Any, pitch: Any) -> Any:
    """One row as fp32, each STEP elements of it `pitch` after those before; `kind` says what its elements are.

    `dims` is a multiple of 16; a `pitch` of STEP leaves the row in one piece.
    """

    def generate(builder: Any, arguments: Any) -> None:
        row, dims, kind, out, pitch = arguments
        v = Lanes(builder)
        with for_range(builder, builder.sdiv(dims, count(WIDTH))) as block:
            start = builder.mul(block, count(WIDTH))
            v.store(load_as_fp32(v, row, start, kind), out, _piece(builder, block, pitch))

    return types.void(*[int64] * 5), nothing(generate)


@intrinsic  # type: ignore[untyped-decorator]
def interleave(_: Any, even: Any, odd: Any, dims: Any, out: Any, pitch: Any) -> Any:
    """Two rows of bf16 as pairs, element by element, laid out as `widen` does."""

    def generate(builder: Any, arguments: Any) -> None:
        even, odd, dims, out, pitch = arguments
        v, words = Lanes(builder), ir.VectorType(I32, WIDTH)
        with for_range(builder, builder.sdiv(dims, count(WIDTH))) as block:
            start = builder.mul(block, count(WIDTH))
            low, high = (builder.bitcast(load_as_fp32(v, row, start, count(1)), words) for row in (even, odd))
            pair = builder.or_(builder.lshr(low, ir.Constant(words, [16] * WIDTH)), high)
            v.store(builder.bitcast(pair, V16), out, _piece(builder, block, pitch))

    return types.void(*[int64] * 5), nothing(generate)


def _piece(builder: Any, block: Any, pitch: Any) -> Any:
    """Where lane group `block` of a row begins, each STEP elements `pitch` after those before."""
    piece = builder.mul(builder.udiv(block, count(GROUPS)), pitch)
    return builder.add(piece, builder.mul(builder.urem(block, count(GROUPS)), count(WIDTH)))


@intrinsic  # type: ignore[untyped-decorator]
def narrow(_: Any, row: Any, dims: Any, kind: Any, out: Any) -> Any:
    """fp32 row to fp32 (`kind` 0) or bf16 (1); `dims` is a multiple of 16."""

    def generate(builder: Any, arguments: Any) -> None:
        row, dims, kind, out = arguments
        v = Lanes(builder)
        with for_range(builder, builder.sdiv(dims, count(WIDTH))) as block:
            start = builder.mul(block, count(WIDTH))
            store_as(v, v.load(row, start), out, start, kind)

    return types.void(*[int64] * 4), nothing(generate)


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(_: Any, address: Any, size: Any) -> Any:
    """Ask for `size` bytes that will be read soon; memory is slow, and rows lie where no processor would guess."""

    def generate(builder: Any, arguments: Any) -> None:
        address, size = arguments
        with for_range(builder, builder.sdiv(builder.add(size, count(63)), count(64))) as line:
            prefetch_line(builder, builder.add(address, builder.mul(line, count(64))))

    return types.void(int64, int64), nothing(generate)


def prefetch_line(builder: Any, address: Any) -> None:
    """Emit the request for the cache line at `address` (int64), which need not be readable."""
    if llvmlite.binding.llvm_version_info[0] < 17:  # pointers had types, and the function another name for each
        return
    pointer, how = ir.IntType(8).as_pointer(), [ir.Constant(I32, value) for value in (0, 2, 1)]
    kind = ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32])
    fetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(fetch, [builder.inttoptr(address, pointer), *how])
