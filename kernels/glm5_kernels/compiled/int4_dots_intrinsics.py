"""The inner loop of int8 products with a weight whose codes all have 4 bits: 1.5 times as fast where there is no VNNI.

VPMADDUBSW multiplies unsigned by signed bytes and adds neighbours in int16, in which int8 times int8 would saturate. A
code of -8..7 plus 8 is at most 15: sixteen products of each lane fit, 30,720 at most. Whether every code was one is
found on the way.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir
from numba import int64, types
from numba.core import cgutils
from numba.extending import intrinsic

from glm5_kernels.compiled.int8_dots_intrinsics import STEP, TILE, DotsTile, add_lanes, pmaddwd, zeros
from glm5_kernels.compiled.int8_ways import CHOSEN
from glm5_kernels.compiled.simd import I8, I16, I32, I64, for_range, i64_const, returns_value

#: Multiplications whose results one int16 holds: 8 * 2 * 15 * 128 < 2^15.
_HELD = 8
_CODES = ir.VectorType(I8, STEP)


def _not_4_bits(builder: Any, shifted: Any) -> Any:
    """int64 0 if every lane, codes plus 8 that were or-ed together, is 0..15; else 1."""
    kind, bits = shifted.type, ir.IntType(8 * shifted.type.count)
    high = builder.bitcast(builder.and_(shifted, ir.Constant(kind, [0xF0] * kind.count)), bits)
    return builder.zext(builder.icmp_unsigned("!=", high, ir.Constant(bits, 0)), I64)


class Int4Instruction(NamedTuple):
    """name: LLVM's. columns: bytes it multiplies. rows: weight rows at once: as many as the registers hold sums of."""

    name: str
    columns: int
    rows: int

    def generate(self, tile: DotsTile, sums_of_tokens: Any) -> Any:
        """out[t, r]; returns 0 if every code had 4 bits."""
        builder = tile.builder
        (seen,) = zeros(builder, I8, self.columns, 1)
        for first in range(0, TILE, self.rows):
            totals = [zeros(builder, I32, self.columns // 4, self.rows) for _ in tile.tokens]
            group = _HELD * self.columns // STEP  # blocks
            groups = builder.sdiv(builder.add(tile.blocks, i64_const(group - 1)), i64_const(group))
            with for_range(builder, groups) as number:
                begin = builder.mul(number, i64_const(group))
                left = builder.sub(tile.blocks, begin)
                count = builder.select(builder.icmp_signed("<", left, i64_const(group)), left, i64_const(group))
                self._add_group(tile, range(first, first + self.rows), begin, count, totals, seen)
            for t, places in enumerate(totals):
                excess = tile.load(I32, sums_of_tokens, i64_const(4 * t))
                excess = builder.shl(excess, ir.Constant(I32, 3))
                for r, place in enumerate(places):
                    tile.store(t, first + r, builder.sub(add_lanes(builder, builder.load(place)), excess))
        return _not_4_bits(builder, builder.load(seen))

    def _add_group(
        self, tile: DotsTile, rows: range, begin: Any, count: Any, totals: list[list[Any]], seen: Any
    ) -> None:
        """Add the products of blocks begin..begin + count, at most a group, to totals."""
        builder, kind, lanes = tile.builder, ir.VectorType(I8, self.columns), self.columns // 2
        words = ir.VectorType(I16, lanes)
        multiply = cgutils.get_or_insert_function(builder.module, ir.FunctionType(words, [kind, kind]), self.name)
        sums = [zeros(builder, I16, lanes, len(rows)) for _ in totals]
        with for_range(builder, count) as index:
            block = builder.add(begin, index)
            tile.prefetch(block, rows)
            for part in range(0, STEP, self.columns):
                offset = builder.add(builder.mul(block, i64_const(STEP)), i64_const(part))
                eights = ir.Constant(kind, [8] * self.columns)
                weights = [builder.add(tile.load(kind, tile.rows[row], offset), eights) for row in rows]
                for weight in weights:
                    builder.store(builder.or_(builder.load(seen), weight), seen)
                for places, token in zip(sums, tile.tokens, strict=True):
                    codes = tile.load(kind, token, offset)
                    for place, weight in zip(places, weights, strict=True):
                        pairs = builder.call(multiply, [weight, codes])
                        builder.store(builder.add(builder.load(place), pairs), place)
        ones = ir.Constant(words, [1] * lanes)
        for into, places in zip(totals, sums, strict=True):
            for total, place in zip(into, places, strict=True):
                builder.store(pmaddwd(builder, builder.load(total), builder.load(place), ones), total)


#: For some of `int8_ways.WAYS`; VNNI is as fast with 8 bits.
_INSTRUCTIONS = {
    "avx512bw": Int4Instruction("llvm.x86.avx512.pmaddubs.w.512", 64, 4),
    "avx2": Int4Instruction("llvm.x86.avx2.pmadd.ub.sw", 32, 2),
    "sse4.1": Int4Instruction("llvm.x86.ssse3.pmadd.ub.sw.128", 16, 2),
}
_CHOSEN = _INSTRUCTIONS.get(CHOSEN.feature)
#: Whether `dots_of_int4` ever multiplies.
HAS_INT4 = _CHOSEN is not None


def _dots(tokens: int) -> Any:
    """The intrinsic out[t, r] of a tile of so many tokens, int32, as `int8_dots_intrinsics.dots` but for its tokens.

    x holds int8, `sums` is the address of every token's sum, int32. Returns 0, or 1 if a code of the weight has more
    than 4 bits: then nothing in out counts.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def dots_of_int4(
        _: Any, x: Any, x_pitch: Any, w: Any, blocks: Any, out: Any, out_pitch: Any, ahead: Any, stride: Any, sums: Any
    ) -> Any:  # fmt: skip
        def generate(builder: Any, arguments: Any) -> Any:
            tile = DotsTile(builder, arguments[:-1], tokens)
            return i64_const(1) if _CHOSEN is None else _CHOSEN.generate(tile, arguments[-1])

        return types.int64(*[int64] * 9), returns_value(generate)

    return dots_of_int4


dots_of_int4, dots_of_one_int4 = _dots(TILE), _dots(1)


@intrinsic  # type: ignore[untyped-decorator]
def beyond_int4(_: Any, w: Any) -> Any:
    """0 if the STEP codes at this address have 4 bits each, else 1."""

    def generate(builder: Any, arguments: Any) -> Any:
        codes = builder.load(builder.inttoptr(arguments[0], _CODES.as_pointer()))
        codes.align = 1
        return _not_4_bits(builder, builder.add(codes, ir.Constant(_CODES, [8] * STEP)))

    return types.int64(int64), returns_value(generate)


@intrinsic  # type: ignore[untyped-decorator]
def narrow(_: Any, words: Any, columns: Any, out: Any) -> Any:
    """out int8 <- words int16, whole steps of columns; returns their sum. Both are addresses."""

    def generate(builder: Any, arguments: Any) -> Any:
        words, columns, out = arguments
        (total,) = zeros(builder, I32, STEP, 1)
        with for_range(builder, builder.sdiv(columns, i64_const(STEP))) as step:
            place = builder.mul(step, i64_const(STEP))
            source = builder.add(words, builder.mul(place, i64_const(2)))
            codes = builder.load(builder.inttoptr(source, ir.VectorType(I16, STEP).as_pointer()))
            codes.align = 2
            target = builder.inttoptr(builder.add(out, place), _CODES.as_pointer())
            builder.store(builder.trunc(codes, _CODES), target).align = 1
            builder.store(builder.add(builder.load(total), builder.sext(codes, ir.VectorType(I32, STEP))), total)
        return builder.sext(add_lanes(builder, builder.load(total)), I64)

    return types.int64(*[int64] * 3), returns_value(generate)
