"""Rows of a cache, wherever they lie, as fp32 tiles that a kernel can multiply with."""

from __future__ import annotations

from typing import Any

import torch
from numba import int64, types
from numba.extending import intrinsic

from glm5_kernels.simd import I64, WIDTH, Lanes, count, for_range, load_as_fp32, nothing, turn_sixteen

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
        with for_range(builder, builder.sdiv(dims, count(WIDTH))) as block:
            start = builder.mul(block, count(WIDTH))
            addresses = [builder.load(builder.gep(table, [count(lane)])) for lane in range(WIDTH)]
            loaded = [load_as_fp32(v, address, start, kind) for address in addresses]
            for number, column in enumerate(turn_sixteen(v, loaded)):
                v.store(column, out, builder.mul(builder.add(start, count(number)), pitch))

    return types.void(int64, int64, int64, int64, int64), nothing(generate)


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
