"""The inner loop of int8 products: 4 tokens times 4 weight rows, in the instructions that the processor has.

    AVX-512 VNNI   VPDPBUSD: 64 unsigned times signed bytes, fours added in int32
    AVX2           VPMADDWD: 16 products of int16, pairs added in int32; the bytes are widened first
    other          the same by LLVM's plain multiplications (SSE, NEON)

All are exact: the same int32 in each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import int64, types
from numba.core import cgutils
from numba.extending import intrinsic

from glm5_kernels.compiled.processor import features
from glm5_kernels.compiled.rows import prefetch_line
from glm5_kernels.compiled.simd import I8, I16, I32, I64, for_range, i64_const, returns_void

STEP = 64  # columns of a step
TILE = 4  # tokens and weight rows worked on together
_WORDS, _FOUR = ir.VectorType(I32, 16), ir.VectorType(I32, TILE)
_PART = 16  # columns widened at a time
_BYTES, _HALVES, _EIGHT = ir.VectorType(I8, _PART), ir.VectorType(I16, _PART), ir.VectorType(I32, _PART // 2)


class DotsTile:
    """Addresses of a tile of `dots`, while its code is generated."""

    def __init__(self, builder: Any, arguments: Any) -> None:
        x, x_pitch, w, self.blocks, self.out, self.out_pitch, self.ahead, self.stride = arguments
        self.builder = builder
        table = builder.inttoptr(w, I64.as_pointer())
        self.rows = [builder.load(builder.gep(table, [i64_const(r)])) for r in range(TILE)]
        self.tokens = [builder.add(x, builder.mul(x_pitch, i64_const(t))) for t in range(TILE)]

    def prefetch(self, block: Any) -> None:
        """Two lines of what comes next."""
        for number in (block, self.builder.add(block, self.blocks)):
            prefetch_line(self.builder, self.builder.add(self.ahead, self.builder.mul(number, self.stride)))

    def load(self, kind: Any, address: Any, offset: Any) -> Any:
        value = self.builder.load(self.builder.inttoptr(self.builder.add(address, offset), kind.as_pointer()))
        value.align = 1
        return value

    def store(self, token: int, row: int, value: Any) -> None:
        """`value`, int32 lanes of out[token, row:]."""
        place = self.builder.add(self.builder.mul(self.out_pitch, i64_const(token)), i64_const(row))
        target = self.builder.add(self.out, self.builder.mul(place, i64_const(4)))
        self.builder.store(value, self.builder.inttoptr(target, value.type.as_pointer())).align = 4


def _by_vnni(tile: DotsTile) -> None:
    builder = tile.builder
    kind = ir.FunctionType(_WORDS, [_WORDS] * 3)
    multiply_add = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.vpdpbusd.512")
    zero, ones = ir.Constant(_WORDS, [0] * 16), ir.Constant(_WORDS, [0x01010101] * 16)
    sums = [[cgutils.alloca_once_value(builder, zero) for _ in range(TILE)] for _ in range(TILE + 1)]
    for row in sums:
        for place in row:
            builder.store(zero, place)
    with for_range(builder, tile.blocks) as block:
        offset = builder.mul(block, i64_const(STEP))
        tile.prefetch(block)
        weights = [tile.load(_WORDS, row, offset) for row in tile.rows]
        inputs = [tile.load(_WORDS, token, offset) for token in tile.tokens]
        for places, unsigned in zip(sums, [*inputs, ones], strict=True):
            for place, weight in zip(places, weights, strict=True):
                builder.store(builder.call(multiply_add, [builder.load(place), unsigned, weight]), place)
    totals = [_totals(builder, [builder.load(place) for place in places]) for places in sums]
    offset = builder.mul(totals[TILE], ir.Constant(_FOUR, [128] * TILE))
    for t in range(TILE):
        tile.store(t, 0, builder.sub(totals[t], offset))


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


def _by_pairs(multiply_pairs: Callable[[Any, Any, Any], Any]) -> Callable[[DotsTile], None]:
    """multiply_pairs(builder, a, b): int16 [16] times int16 [16], neighbours added -> int32 [8]."""

    def generate(tile: DotsTile) -> None:
        builder, zero = tile.builder, ir.Constant(_EIGHT, [0] * (_PART // 2))
        flip = ir.Constant(_BYTES, [-128] * _PART)
        kind = ir.FunctionType(I32, [_EIGHT])
        add_lanes = cgutils.get_or_insert_function(builder.module, kind, "llvm.vector.reduce.add.v8i32")
        for first in range(0, TILE, 2):  # two rows: the sums of four would not fit sixteen registers
            rows = tile.rows[first : first + 2]
            sums = [[cgutils.alloca_once_value(builder, zero) for _ in rows] for _ in range(TILE)]
            for places in sums:
                for place in places:
                    builder.store(zero, place)
            with for_range(builder, tile.blocks) as block:
                if first == 0:
                    tile.prefetch(block)
                for part in range(0, STEP, _PART):
                    offset = builder.add(builder.mul(block, i64_const(STEP)), i64_const(part))
                    weights = [builder.sext(tile.load(_BYTES, row, offset), _HALVES) for row in rows]
                    for places, token in zip(sums, tile.tokens, strict=True):
                        codes = builder.sext(builder.xor(tile.load(_BYTES, token, offset), flip), _HALVES)
                        for place, weight in zip(places, weights, strict=True):
                            added = multiply_pairs(builder, codes, weight)
                            builder.store(builder.add(builder.load(place), added), place)
            for t, places in enumerate(sums):
                for r, place in enumerate(places):
                    tile.store(t, first + r, builder.call(add_lanes, [builder.load(place)]))

    return generate


def _vpmaddwd(builder: Any, a: Any, b: Any) -> Any:
    kind = ir.FunctionType(_EIGHT, [_HALVES, _HALVES])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx2.pmadd.wd"), [a, b])


def _plain(builder: Any, a: Any, b: Any) -> Any:
    wide = ir.VectorType(I32, _PART)
    products = builder.mul(builder.sext(a, wide), builder.sext(b, wide))
    halves = (ir.Constant(_EIGHT, list(range(start, start + _PART // 2))) for start in (0, _PART // 2))
    return builder.add(*(builder.shuffle_vector(products, products, half) for half in halves))


#: Feature and the code made for it; the first that the processor has.
WAYS: tuple[tuple[str, Callable[[DotsTile], None]], ...] = (
    ("avx512vnni", _by_vnni),
    ("avx2", _by_pairs(_vpmaddwd)),
    ("", _by_pairs(_plain)),
)
FEATURE, _GENERATE = next((name, way) for name, way in WAYS if not name or name in features())


@intrinsic  # type: ignore[untyped-decorator]
def dots(_: Any, x: Any, x_pitch: Any, w: Any, blocks: Any, out: Any, out_pitch: Any, ahead: Any, stride: Any) -> Any:
    """out[t, r] of a tile, int32; x holds int8 + 128, `w` the addresses of the tile's weight rows.

    On the way it asks for 2 `blocks` lines of the cache, `stride` bytes apart, from `ahead` on.
    """

    def generate(builder: Any, arguments: Any) -> None:
        _GENERATE(DotsTile(builder, arguments))

    return types.void(*[int64] * 8), returns_void(generate)
