"""Rows at any address, e.g. of a paged cache, converted to fp32 tiles."""

from __future__ import annotations

from typing import Any, NamedTuple

import llvmlite.binding
import torch
from llvmlite import ir

from glm5_kernels.compiled.simd import BF16, FP32, GROUPS, I32, I64, INT8, WIDTH, Lanes, call_llvm, i64_const, intrinsic

#: Element kinds of rows with a torch dtype; `simd` has the constants.
KINDS = {torch.float32: FP32, torch.bfloat16: BF16, torch.int8: INT8}
#: Further kinds. PACKED: a row of int8 latents, bf16 rotated keys and fp32 scales. PAIRED: bf16 that stay two by two,
#: moved like an fp32, as `Lanes.add_pairs` multiplies them.
PACKED, PAIRED = 3, 4
#: Bytes of an element, by kind; of PACKED those of its int8 part, of PAIRED those of one bf16.
ELEMENT_BYTES = (4, 2, 1, 1, 2)


class RowAddress(NamedTuple):
    """The rows of a tensor [A, B, D]: row (a, b) begins at base + a * block_pitch + b * row_pitch, in bytes.

    A paged cache is [num_blocks, block_size, D], queries are [T, heads, D]. kind: of its elements.
    """

    base: int
    block_pitch: int
    row_pitch: int
    kind: int


def row_address(x: torch.Tensor, kind: int | None = None) -> RowAddress:
    """The rows of x [A, B, D], whose last dimension is contiguous; `kind` overrides the kind of its dtype."""
    size = x.element_size()
    return RowAddress(x.data_ptr(), x.stride(0) * size, x.stride(1) * size, KINDS[x.dtype] if kind is None else kind)


def matrix_address(x: torch.Tensor) -> RowAddress:
    """The rows of x [B, D], whose last dimension is contiguous."""
    return RowAddress(x.data_ptr(), 0, x.stride(0) * x.element_size(), KINDS[x.dtype])


@intrinsic()
def transpose(v: Lanes, rows: Any, skipped: Any, dims: Any, kind: Any, out: Any, pitch: Any) -> None:
    """out fp32 [dims, 16] <- sixteen rows [dims] transposed, each `skipped` bytes after an address (int64) at `rows`.

    `dims` is a multiple of 16, `pitch` the distance of out's rows in fp32 elements, `kind` that of the rows' elements.
    """
    builder = v.builder
    table = builder.inttoptr(rows, I64.as_pointer()), skipped
    whole_pairs = builder.icmp_signed("==", builder.and_(dims, i64_const(2 * WIDTH - 1)), i64_const(0))
    with builder.if_else(builder.and_(builder.icmp_signed("==", kind, i64_const(BF16)), whole_pairs)) as (bf16, other):
        with bf16:
            _transpose_pairs(v, table, dims, out, pitch)
        with other:
            _transpose_elements(v, table, dims, kind, out, pitch)


def _transpose_elements(v: Lanes, table: Any, dims: Any, kind: Any, out: Any, pitch: Any) -> None:
    builder = v.builder
    with v.lane_groups(builder.sdiv(dims, i64_const(WIDTH))) as start:
        loaded = [v.load_as_fp32(address, start, kind) for address in _addresses(builder, table)]
        for number, column in enumerate(v.transpose_16x16(loaded)):
            v.store(column, out, builder.mul(builder.add(start, i64_const(number)), pitch))


def _transpose_pairs(v: Lanes, table: Any, dims: Any, out: Any, pitch: Any) -> None:
    """Two neighbouring bf16 as one lane, which halves the shuffles; a bf16 is the upper half of an fp32."""
    builder = v.builder
    with v.lane_groups(builder.sdiv(dims, i64_const(2 * WIDTH))) as start:
        loaded = [v.load(address, start) for address in _addresses(builder, table)]
        for pair in loaded:
            pair.align = 2  # a row of bf16 may start anywhere
        for number, pairs in enumerate(v.transpose_16x16(loaded)):
            for half, value in enumerate(reversed(v.halves(pairs))):
                dim = builder.add(builder.shl(start, i64_const(1)), i64_const(2 * number + half))
                v.store(value, out, builder.mul(dim, pitch))


def _addresses(builder: Any, table: Any) -> list[Any]:
    starts, skipped = table
    return [builder.add(builder.load(builder.gep(starts, [i64_const(lane)])), skipped) for lane in range(WIDTH)]


@intrinsic()
def turn(v: Lanes, rows: Any, pitch: Any, groups: Any, out: Any, out_pitch: Any) -> None:
    """out [16, 16 * groups] <- sixteen columns of rows [16 * groups]; pitches count elements, of 32 bits."""
    builder = v.builder
    with v.lane_groups(groups) as first:
        offsets = [builder.mul(builder.add(first, i64_const(i)), pitch) for i in range(WIDTH)]
        for number, column in enumerate(v.transpose_16x16([v.load(rows, offset) for offset in offsets])):
            v.store(column, out, builder.add(builder.mul(out_pitch, i64_const(number)), first))


@intrinsic()
def load_row_as_fp32(v: Lanes, row: Any, dims: Any, kind: Any, out: Any, pitch: Any) -> None:
    """out fp32 <- one row [dims] of elements of `kind`, cut into pieces of STEP elements that lie `pitch` fp32 apart.

    `dims` is a multiple of 16; a `pitch` of STEP keeps the row in one piece.
    """
    builder = v.builder
    with v.loop(builder.sdiv(dims, i64_const(WIDTH))) as block:
        start = builder.mul(block, i64_const(WIDTH))
        v.store(v.load_as_fp32(row, start, kind), out, _piece_offset(builder, block, pitch))


@intrinsic()
def load_columns_as_fp32(v: Lanes, rows: Any, count: Any, skipped: Any, kind: Any, out: Any) -> None:
    """out fp32 [count, STEP] <- of each row the STEP elements of `kind` that begin `skipped` bytes after its start.

    The rows' addresses are the int64 at `rows`.
    """
    builder = v.builder
    table = builder.inttoptr(rows, I64.as_pointer())
    with v.loop(count) as row:
        source = builder.add(builder.load(builder.gep(table, [row])), skipped)
        for group in range(GROUPS):
            offset = builder.add(builder.mul(row, i64_const(WIDTH * GROUPS)), i64_const(WIDTH * group))
            v.store(v.load_as_fp32(source, i64_const(WIDTH * group), kind), out, offset)


@intrinsic()
def interleave(v: Lanes, even: Any, odd: Any, dims: Any, out: Any, pitch: Any) -> None:
    """out <- two rows of bf16 [dims] as pairs (even[d], odd[d]) of 32 bits, laid out as `load_row_as_fp32` does."""
    builder = v.builder
    with v.loop(builder.sdiv(dims, i64_const(WIDTH))) as block:
        start = builder.mul(block, i64_const(WIDTH))
        pair = v.joined(*(v.load_as_fp32(row, start, i64_const(BF16)) for row in (even, odd)))
        v.store(pair, out, _piece_offset(builder, block, pitch))


def _piece_offset(builder: Any, block: Any, pitch: Any) -> Any:
    """Offset in fp32 of lane group `block` of a row that is cut into pieces of STEP elements, `pitch` apart."""
    piece = builder.mul(builder.udiv(block, i64_const(GROUPS)), pitch)
    return builder.add(piece, builder.mul(builder.urem(block, i64_const(GROUPS)), i64_const(WIDTH)))


@intrinsic()
def store_row_as(v: Lanes, row: Any, dims: Any, kind: Any, out: Any) -> None:
    """out <- fp32 row [dims] as FP32 or BF16, which is `kind`; `dims` is a multiple of 16."""
    builder = v.builder
    with v.lane_groups(builder.sdiv(dims, i64_const(WIDTH))) as start:
        v.store_as(v.load(row, start), out, start, kind)


@intrinsic()
def prefetch(v: Lanes, address: Any, size: Any) -> None:
    """Prefetch `size` bytes: selected rows are scattered, so no hardware prefetcher finds them."""
    builder = v.builder
    with v.loop(builder.sdiv(builder.add(size, i64_const(63)), i64_const(64))) as line:
        prefetch_line(builder, builder.add(address, builder.mul(line, i64_const(64))))


def prefetch_line(builder: Any, address: Any) -> None:
    """Prefetch the cache line at `address` (int64), which need not be readable."""
    if llvmlite.binding.llvm_version_info[0] < 17:  # pointers had types, and the function another name for each
        return
    pointer, how = ir.IntType(8).as_pointer(), [ir.Constant(I32, value) for value in (0, 2, 1)]
    call_llvm(builder, ir.VoidType(), "prefetch.p0", builder.inttoptr(address, pointer), *how)
