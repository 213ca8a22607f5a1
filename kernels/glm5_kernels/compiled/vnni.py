"""int8 products for a few rows: the weight is read once, in the order it lies in memory.

A library's product packs the weight first, which pays for many rows only. Here 64 bytes of a weight row meet 64 bytes
of each token in one instruction (AVX-512 VNNI), which multiplies unsigned by signed bytes and adds fours in int32.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding
import numpy as np
import torch
from llvmlite import ir
from numba import int64, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from glm5_kernels.compiled.rows import prefetch_line
from glm5_kernels.compiled.simd import I32, for_range, i64_const, returns_void
from glm5_kernels.compiled.threads import each

AVAILABLE = bool(llvmlite.binding.get_host_cpu_features().get("avx512vnni"))
#: More tokens than this are a library's case.
TOKENS = 16
STEP = 64  # columns per instruction
TILE = 4  # tokens and weight rows worked on together
ROWS = 256  # weight rows of a task
_WORDS, _FOUR = ir.VectorType(I32, 16), ir.VectorType(I32, TILE)


def matmul(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """int8 [T, K] times int8 [N, K] transposed -> int32 [T, N], exact; many tokens go to torch."""
    tokens, k = a.shape
    if not AVAILABLE or not 0 < tokens <= TOKENS or k % STEP or w.stride(1) != 1:
        return torch.zeros(0, len(w), dtype=torch.int32) if tokens == 0 else torch._int_mm(a, w.t())
    # Unsigned by an offset of 128; the kernel takes 128 * sum(w) off again.
    x = torch.full((-(-tokens // TILE) * TILE, k), 128, dtype=torch.uint8)
    x[:tokens] = (a.to(torch.int16) + 128).to(torch.uint8)
    out = torch.empty(len(x), len(w), dtype=torch.int32)

    def one(number: int) -> None:
        first, last = number * ROWS, min((number + 1) * ROWS, len(w))
        rows(x.data_ptr(), len(x), k, w.data_ptr(), w.stride(0), first, last, out.numpy())

    each(one, -(-len(w) // ROWS))
    return out[:tokens]


def _totals(builder: Any, rows: list[Any]) -> Any:
    """The sums of four vectors' lanes as one vector of four: each step adds halves and leaves half as many vectors."""

    def halves(pair: list[Any], low: list[int], high: list[int]) -> Any:
        parts = (builder.shuffle_vector(*pair, ir.Constant(ir.VectorType(I32, len(o)), o)) for o in (low, high))
        return builder.add(*parts)

    def every(lanes: list[int]) -> list[int]:
        """The same choice in each quarter; 4 and above mean the second vector."""
        return [quarter + (lane if lane < 4 else lane + 12) for quarter in range(0, 16, 4) for lane in lanes]

    pairs = [halves(rows[i : i + 2], every([0, 4, 1, 5]), every([2, 6, 3, 7])) for i in (0, 2)]
    mixed = halves(pairs, every([0, 1, 4, 5]), every([2, 3, 6, 7]))  # [a, b, c, d] of each quarter
    mixed = halves([mixed, mixed], list(range(8)), list(range(8, 16)))
    return halves([mixed, mixed], list(range(4)), list(range(4, 8)))


@intrinsic  # type: ignore[untyped-decorator]
def _dots(_: Any, x: Any, x_pitch: Any, w: Any, blocks: Any, out: Any, out_pitch: Any, ahead: Any, stride: Any) -> Any:
    """out[t, r] of a tile, int32; `w` holds the addresses of its weight rows.

    On the way it asks for 2 `blocks` lines of the cache, `stride` bytes apart, from `ahead` on.
    """

    def generate(builder: Any, arguments: Any) -> None:
        x, x_pitch, w, blocks, out, out_pitch, ahead, stride = arguments
        kind = ir.FunctionType(_WORDS, [_WORDS] * 3)
        multiply_add = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.vpdpbusd.512")
        zero, ones = ir.Constant(_WORDS, [0] * 16), ir.Constant(_WORDS, [0x01010101] * 16)
        table = builder.inttoptr(w, ir.IntType(64).as_pointer())
        rows = [builder.load(builder.gep(table, [i64_const(r)])) for r in range(TILE)]
        tokens = [builder.add(x, builder.mul(x_pitch, i64_const(t))) for t in range(TILE)]
        sums = [[cgutils.alloca_once_value(builder, zero) for _ in range(TILE)] for _ in range(TILE + 1)]

        def load(address: Any, offset: Any) -> Any:
            value = builder.load(builder.inttoptr(builder.add(address, offset), _WORDS.as_pointer()))
            value.align = 1
            return value

        for row in sums:
            for place in row:
                builder.store(zero, place)
        with for_range(builder, blocks) as block:
            offset = builder.mul(block, i64_const(STEP))
            for half in (builder.mul(block, stride), builder.mul(builder.add(block, blocks), stride)):
                prefetch_line(builder, builder.add(ahead, half))
            weights, inputs = [load(row, offset) for row in rows], [load(token, offset) for token in tokens]
            for places, unsigned in zip(sums, [*inputs, ones], strict=True):
                for place, weight in zip(places, weights, strict=True):
                    builder.store(builder.call(multiply_add, [builder.load(place), unsigned, weight]), place)
        totals = [_totals(builder, [builder.load(place) for place in places]) for places in sums]
        offset = builder.mul(totals[TILE], ir.Constant(_FOUR, [128] * TILE))
        for t in range(TILE):
            target = builder.add(out, builder.mul(builder.mul(out_pitch, i64_const(t)), i64_const(4)))
            builder.store(builder.sub(totals[t], offset), builder.inttoptr(target, _FOUR.as_pointer())).align = 4

    return types.void(*[int64] * 8), returns_void(generate)


if AVAILABLE:

    @njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
    def rows(x: Any, tokens: Any, k: Any, w: Any, pitch: Any, first: Any, last: Any, out: Any) -> None:
        """out int32 [tokens, N] for weight rows first..last; `tokens` a multiple of TILE, x uint8 offset by 128."""
        addresses, tile = np.empty(TILE, np.int64), np.empty((TILE, TILE), np.int32)
        table, pitch_out, stride = addresses.ctypes.data, out.shape[1], max(STEP, 2 * STEP * TILE // tokens)
        for row in range(first, last, TILE):
            for r in range(TILE):
                addresses[r] = w + pitch * min(row + r, last - 1)
            ahead, place = w + pitch * (row + TILE), out.ctypes.data + 4 * row
            for token in range(0, tokens, TILE):
                reach = stride if token < 2 * TILE else 0  # by then all of the next rows are on their way
                if row + TILE <= last:
                    _dots(x + token * k, k, table, k // STEP, place + 4 * token * pitch_out, pitch_out, ahead, reach)
                else:
                    _dots(x + token * k, k, table, k // STEP, tile.ctypes.data, TILE, ahead, reach)
                    out[token : token + TILE, row:last] = tile[:, : last - row]
                ahead += 2 * reach * (k // STEP)
