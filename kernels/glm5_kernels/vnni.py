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
from numba import int32, int64, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from glm5_kernels.simd import I8, I32, count, for_range, nothing
from glm5_kernels.threads import each

AVAILABLE = bool(llvmlite.binding.get_host_cpu_features().get("avx512vnni"))
#: More tokens than this are a library's case.
TOKENS = 16
STEP = 64  # columns per instruction
_TILE = 4  # tokens and weight rows worked on together
_ROWS = 256  # weight rows of a task
_WORDS, _BYTES = ir.VectorType(I32, 16), ir.VectorType(I8, 64)


def matmul(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """int8 [T, K] times int8 [N, K] transposed -> int32 [T, N], exact; many tokens go to torch."""
    tokens, k = a.shape
    if not AVAILABLE or not 0 < tokens <= TOKENS or k % STEP or w.stride(1) != 1:
        return torch.zeros(0, len(w), dtype=torch.int32) if tokens == 0 else torch._int_mm(a, w.t())
    # Unsigned by an offset of 128; the kernel takes 128 * sum(w) off again.
    x = torch.full((-(-tokens // _TILE) * _TILE, k), 128, dtype=torch.uint8)
    x[:tokens] = (a.to(torch.int16) + 128).to(torch.uint8)
    out = torch.empty(len(x), len(w), dtype=torch.int32)

    def one(number: int) -> None:
        first, last = number * _ROWS, min((number + 1) * _ROWS, len(w))
        _rows(x.data_ptr(), len(x), k, w.data_ptr(), w.stride(0), first, last, out.numpy())

    each(one, -(-len(w) // _ROWS))
    return out[:tokens]


@intrinsic  # type: ignore[untyped-decorator]
def _dots(_: Any, x: Any, x_pitch: Any, w: Any, blocks: Any, out: Any, out_pitch: Any) -> Any:
    """out[t, r] of a tile; `w` holds the addresses of its weight rows."""

    def generate(builder: Any, arguments: Any) -> None:
        x, x_pitch, w, blocks, out, out_pitch = arguments
        kind = ir.FunctionType(_WORDS, [_WORDS] * 3)
        multiply_add = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.vpdpbusd.512")
        zero, ones = ir.Constant(_WORDS, [0] * 16), ir.Constant(_WORDS, [0x01010101] * 16)
        table = builder.inttoptr(w, ir.IntType(64).as_pointer())
        rows = [builder.load(builder.gep(table, [count(r)])) for r in range(_TILE)]
        tokens = [builder.add(x, builder.mul(x_pitch, count(t))) for t in range(_TILE)]
        sums = [[cgutils.alloca_once_value(builder, zero) for _ in range(_TILE)] for _ in range(_TILE + 1)]

        def load(address: Any, offset: Any) -> Any:
            value = builder.load(builder.inttoptr(builder.add(address, offset), _WORDS.as_pointer()))
            value.align = 1
            return value

        for row in sums:
            for place in row:
                builder.store(zero, place)
        with for_range(builder, blocks) as block:
            offset = builder.mul(block, count(STEP))
            weights, inputs = [load(row, offset) for row in rows], [load(token, offset) for token in tokens]
            for places, unsigned in zip(sums, [*inputs, ones], strict=True):
                for place, weight in zip(places, weights, strict=True):
                    builder.store(builder.call(multiply_add, [builder.load(place), unsigned, weight]), place)
        add = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(I32, [_WORDS]), "llvm.vector.reduce.add.v16i32"
        )
        target = builder.inttoptr(out, I32.as_pointer())
        for r in range(_TILE):
            offset_sum = builder.mul(builder.call(add, [builder.load(sums[_TILE][r])]), ir.Constant(I32, 128))
            for t in range(_TILE):
                value = builder.sub(builder.call(add, [builder.load(sums[t][r])]), offset_sum)
                builder.store(value, builder.gep(target, [builder.add(builder.mul(out_pitch, count(t)), count(r))]))

    return types.void(*[int64] * 6), nothing(generate)


if AVAILABLE:

    @njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
    def _rows(x: Any, tokens: Any, k: Any, w: Any, pitch: Any, first: Any, last: Any, out: Any) -> None:
        addresses, tile = np.empty(_TILE, np.int64), np.empty((_TILE, _TILE), np.int32)
        for row in range(first, last, _TILE):
            for r in range(_TILE):
                addresses[r] = w + pitch * min(row + r, last - 1)
            for token in range(0, tokens, _TILE):
                _dots(x + token * k, k, addresses.ctypes.data, k // STEP, tile.ctypes.data, _TILE)
                for t in range(_TILE):
                    for r in range(min(_TILE, last - row)):
                        out[token + t, row + r] = int32(tile[t, r])
