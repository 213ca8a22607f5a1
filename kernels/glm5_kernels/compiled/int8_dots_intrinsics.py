"""The inner loop of int8 products: 4 tokens, or one, times 4 weight rows, in the instructions of `int8_ways`.

VPDPBUSD adds fours of unsigned times signed bytes in int32, SDOT of signed ones; PMADDWD adds pairs of int16, so bytes
are widened first, those of tokens before they come here; SMMLA multiplies two tokens by two rows, 8 columns of each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir
from numba import int64, types
from numba.core import cgutils
from numba.extending import intrinsic

from glm5_kernels.compiled.int8_ways import CHOSEN
from glm5_kernels.compiled.rows import prefetch_line
from glm5_kernels.compiled.simd import I8, I16, I32, I64, for_range, i64_const, returns_void

STEP = 64  # columns of a step
TILE = 4  # tokens and weight rows worked on together
_WORDS, _FOUR = ir.VectorType(I32, 16), ir.VectorType(I32, TILE)


class DotsTile:
    """Addresses of a tile of `dots`, while its code is generated."""

    def __init__(self, builder: Any, arguments: Any, tokens: int) -> None:
        x, x_pitch, w, self.blocks, self.out, self.out_pitch, self.ahead, self.stride = arguments
        self.builder = builder
        table = builder.inttoptr(w, I64.as_pointer())
        self.rows = [builder.load(builder.gep(table, [i64_const(r)])) for r in range(TILE)]
        self.tokens = [builder.add(x, builder.mul(x_pitch, i64_const(t))) for t in range(tokens)]

    def prefetch(self, block: Any, rows: range = range(TILE)) -> None:
        """A line of what comes next for each of these rows."""
        for row in rows:
            number = self.builder.add(block, self.builder.mul(self.blocks, i64_const(row)))
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
    sums = [[cgutils.alloca_once_value(builder, zero) for _ in range(TILE)] for _ in [*tile.tokens, ones]]
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
    offset = builder.mul(totals.pop(), ir.Constant(_FOUR, [128] * TILE))
    for t, total in enumerate(totals):
        tile.store(t, 0, builder.sub(total, offset))


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


def _by_smmla(tile: DotsTile) -> None:
    """Sums of two tokens and two rows lie in one vector: [t r, t r+1, t+1 r, t+1 r+1]."""
    builder, kind, sums_of = (
        tile.builder,
        ir.VectorType(I8, 16),
        ir.FunctionType(_FOUR, [_FOUR] + [ir.VectorType(I8, 16)] * 2),
    )
    multiply = cgutils.get_or_insert_function(builder.module, sums_of, "llvm.aarch64.neon.smmla.v4i32.v16i8")
    pairs = range(0, TILE, 2)
    sums = [zeros(builder, I32, 4, TILE // 2) for _ in pairs]
    with for_range(builder, tile.blocks) as block:
        tile.prefetch(block)
        for part in range(0, STEP, 16):
            offset = builder.add(builder.mul(block, i64_const(STEP)), i64_const(part))
            tokens = [tile.load(kind, token, offset) for token in tile.tokens]
            weights = [tile.load(kind, row, offset) for row in tile.rows]
            for half in (0, 8):
                a, b = ([_beside(builder, each[i], each[i + 1], half) for i in pairs] for each in (tokens, weights))
                for places, left in zip(sums, a, strict=True):
                    for place, right in zip(places, b, strict=True):
                        builder.store(builder.call(multiply, [builder.load(place), left, right]), place)
    for t, places in zip(pairs, sums, strict=True):
        for r, place in zip(pairs, places, strict=True):
            for lane in range(4):
                total = builder.extract_element(builder.load(place), ir.Constant(I32, lane))
                tile.store(t + lane // 2, r + lane % 2, total)


def _beside(builder: Any, first: Any, second: Any, start: int) -> Any:
    """Eight bytes of each, from `start` on."""
    lanes = [*range(start, start + 8), *range(16 + start, 24 + start)]
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(I32, 16), lanes))


class DotsInstruction(NamedTuple):
    """An instruction that multiplies bytes of one weight row and one token and adds neighbours.

    rows: weight rows at once: as many as the registers hold sums of. columns: bytes loaded at a time. lanes: of a sum.
    code: type of a token's element. offset: it is int8 + 128; what is too much is taken off at the end.
    widen(builder, bytes of a weight): operand. multiply_add(builder, total, token, weight): the new total.
    """

    rows: int
    columns: int
    lanes: int
    code: Any
    offset: bool
    widen: Callable[[Any, Any], Any]
    multiply_add: Callable[[Any, Any, Any, Any], Any]

    def generate(self, tile: DotsTile) -> None:
        builder, kind = tile.builder, ir.VectorType(I8, self.columns)
        for first in range(0, TILE, self.rows):
            rows = tile.rows[first : first + self.rows]
            sums = [zeros(builder, I32, self.lanes, len(rows)) for _ in range(len(tile.tokens) + self.offset)]
            with for_range(builder, tile.blocks) as block:
                tile.prefetch(block, range(first, first + self.rows))
                for part in range(0, STEP, self.columns):
                    offset = builder.add(builder.mul(block, i64_const(STEP)), i64_const(part))
                    weights = [self.widen(builder, tile.load(kind, row, offset)) for row in rows]
                    tokens = [self._token(tile, token, offset) for token in tile.tokens]
                    ones = [self.widen(builder, ir.Constant(kind, [1] * self.columns))] * self.offset
                    for places, token in zip(sums, [*tokens, *ones], strict=True):
                        for place, weight in zip(places, weights, strict=True):
                            builder.store(self.multiply_add(builder, builder.load(place), token, weight), place)
            self._store(tile, first, sums)

    def _token(self, tile: DotsTile, address: Any, offset: Any) -> Any:
        kind, size = ir.VectorType(self.code, self.columns), self.code.width // 8
        value = tile.load(kind, address, tile.builder.mul(offset, i64_const(size)))
        return value if size > 1 else self.widen(tile.builder, value)

    def _store(self, tile: DotsTile, first: int, sums: list[list[Any]]) -> None:
        builder = tile.builder
        totals = [[add_lanes(builder, builder.load(place)) for place in places] for places in sums]
        for t in range(len(tile.tokens)):
            for r, total in enumerate(totals[t]):
                if self.offset:
                    total = builder.sub(total, builder.mul(totals[-1][r], ir.Constant(I32, 128)))
                tile.store(t, first + r, total)


def zeros(builder: Any, element: Any, lanes: int, count: int) -> list[Any]:
    """Stack slots for sums of vectors; LLVM keeps them in registers."""
    zero = ir.Constant(ir.VectorType(element, lanes), [0] * lanes)
    places = [cgutils.alloca_once_value(builder, zero) for _ in range(count)]
    for place in places:
        builder.store(zero, place)
    return places


def add_lanes(builder: Any, value: Any) -> Any:
    name = f"llvm.vector.reduce.add.v{value.type.count}i32"
    return builder.call(
        cgutils.get_or_insert_function(builder.module, ir.FunctionType(I32, [value.type]), name), [value]
    )


def _as_int16(builder: Any, value: Any) -> Any:
    return builder.sext(value, ir.VectorType(I16, value.type.count))


def _as_words(builder: Any, value: Any) -> Any:
    """Four bytes in an int32 each, as LLVM's names for Intel's instructions want them."""
    return builder.bitcast(value, ir.VectorType(I32, value.type.count // 4))


def _as_bytes(_: Any, value: Any) -> Any:
    return value


def _vpdpbusd(builder: Any, total: Any, token: Any, weight: Any) -> Any:
    kind = ir.FunctionType(total.type, [total.type] * 3)
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.vpdpbusd.256")
    return builder.call(function, [total, token, weight])


#: LLVM's names by the number of int16.
_PMADDWD = {8: "sse2.pmadd.wd", 16: "avx2.pmadd.wd", 32: "avx512.pmaddw.d.512"}


def pmaddwd(builder: Any, total: Any, token: Any, weight: Any) -> Any:
    kind, name = ir.FunctionType(total.type, [token.type] * 2), _PMADDWD[token.type.count]
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}")
    return builder.add(total, builder.call(function, [token, weight]))


def _sdot(builder: Any, total: Any, token: Any, weight: Any) -> Any:
    kind = ir.FunctionType(total.type, [total.type, token.type, token.type])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.aarch64.neon.sdot.v4i32.v16i8")
    return builder.call(function, [total, token, weight])


def _plain(builder: Any, total: Any, token: Any, weight: Any) -> Any:
    count = token.type.count
    wide = ir.VectorType(I32, count)
    products = builder.mul(builder.sext(token, wide), builder.sext(weight, wide))
    halves = [ir.Constant(total.type, list(range(start, start + count // 2))) for start in (0, count // 2)]
    return builder.add(total, builder.add(*(builder.shuffle_vector(products, products, half) for half in halves)))


#: The code made for each of `int8_ways.WAYS`.
GENERATORS: dict[str, Callable[[DotsTile], None]] = {
    "avx512vnni": _by_vnni,
    "avxvnni": DotsInstruction(2, 32, 8, I8, True, _as_words, _vpdpbusd).generate,
    "avx512bw": DotsInstruction(4, 32, 16, I16, False, _as_int16, pmaddwd).generate,
    "avx2": DotsInstruction(2, 16, 8, I16, False, _as_int16, pmaddwd).generate,
    "sse4.1": DotsInstruction(2, 8, 4, I16, False, _as_int16, pmaddwd).generate,
    "i8mm": _by_smmla,
    "dotprod": DotsInstruction(4, 16, 4, I8, False, _as_bytes, _sdot).generate,
    "": DotsInstruction(2, 16, 8, I16, False, _as_int16, _plain).generate,
}


def _dots(tokens: int) -> Any:
    """The intrinsic out[t, r] of a tile of so many tokens, int32; x holds `Int8Way.code`, `w` the addresses of rows.

    x_pitch: in bytes. On the way it asks for TILE * `blocks` lines of the cache, `stride` bytes apart, from `ahead` on.
    """
    # SMMLA multiplies two tokens at least; what has it has SDOT.
    feature = "dotprod" if tokens == 1 and CHOSEN.feature == "i8mm" else CHOSEN.feature

    @intrinsic  # type: ignore[untyped-decorator]
    def dots(
        _: Any, x: Any, x_pitch: Any, w: Any, blocks: Any, out: Any, out_pitch: Any, ahead: Any, stride: Any
    ) -> Any:
        def generate(builder: Any, arguments: Any) -> None:
            GENERATORS[feature](DotsTile(builder, arguments, tokens))

        return types.void(*[int64] * 8), returns_void(generate)

    return dots


dots, dots_of_one = _dots(TILE), _dots(1)
