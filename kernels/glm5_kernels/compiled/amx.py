"""Products of 32 x 32 bf16 or int8 by AMX: four 16 x 16 tiles of sums, in registers of 1 KiB each.

Linux hands out these registers to a process that asks for them. Each thread says once per task what shape they have.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from typing import Any, NamedTuple

from llvmlite import ir
from numba import int64, types
from numba.core import cgutils
from numba.extending import intrinsic

from glm5_kernels.compiled.processor import features
from glm5_kernels.compiled.simd import I8, I32, V16, WIDTH, Lanes, for_range, i64_const, returns_void

#: Rows of a tile, and columns of 32 bits: fp32 or two bf16.
TILE = 16
#: Rows and columns of a product.
SIDE = 2 * TILE
#: Registers: sums by row and column, then operands.
_SUMS, _LEFT, _RIGHT = ((0, 1), (2, 3)), (4, 5), (6, 7)
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # Linux: asm/prctl.h, asm/fpu/types.h


def _permitted() -> bool:
    """Whether Linux gives this process the registers; asking again does no harm."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    refused: int = ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA)
    return refused == 0


#: Whether the processor has the instructions and this process may use them. Without them the code below computes the
#: same, but for denormal numbers, by vectors.
AMX = {"amx-tile", "amx-bf16", "avx512f"} <= features() and _permitted()
#: The same of int8.
AMX_INT8 = AMX and "amx-int8" in features()


def fits(*sizes: int) -> bool:
    """Whether these sizes are whole sides of a product."""
    return not any(size % SIDE for size in sizes)


@intrinsic  # type: ignore[untyped-decorator]
def configure(_: Any) -> Any:
    """Eight registers of 16 rows of 64 bytes, for this thread until `release`."""

    def generate(builder: Any, _: Any) -> None:
        if not AMX:
            return
        shape = [1, 0] + [0] * 14 + [64, 0] * 8 + [0] * 16 + [TILE] * 8 + [0] * 8  # palette 1; bytes of rows; rows
        place = cgutils.alloca_once_value(builder, ir.Constant(ir.ArrayType(I8, 64), shape))
        _call(builder, "ldtilecfg", builder.bitcast(place, I8.as_pointer()))

    return types.void(), returns_void(generate)


@intrinsic  # type: ignore[untyped-decorator]
def release(_: Any) -> Any:
    """The registers as other code expects them: without contents or shape."""

    def generate(builder: Any, _: Any) -> None:
        if AMX:
            _call(builder, "tilerelease")

    return types.void(), returns_void(generate)


class LeftAt(NamedTuple):
    """32 rows of bf16 or int8: two tiles, `apart` from each other, their rows `pitch` apart.

    With `parts` of 2 they are the first term of a sum, whose second one lies `part` behind. All in bytes.
    """

    start: int
    pitch: int
    apart: int
    parts: int
    part: int


class RightAt(NamedTuple):
    """32 columns of bf16 or int8: two tiles of 16 columns, `apart` from each other.

    A row of a tile holds what meets two columns of the left side, as pairs; of int8 four, as fours. Rows lie `pitch`,
    the 16 rows of a step and those of the next one `step` bytes apart.
    """

    start: int
    pitch: int
    apart: int
    step: int


class OutAt(NamedTuple):
    """fp32 or int32 [32, 32]: rows `pitch` bytes apart, row 16 `down` bytes behind row 0."""

    start: int
    pitch: int
    down: int


def multiplied_by(way: Any) -> Any:
    """The intrinsic out = left times right over `steps` times 64 bytes of the left's rows; unless `fresh`, out += that.

    Of each step of bf16 the even columns' products are added in order, and the odd ones'; then both to the sum before.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def multiply(_: Any, left: Any, right: Any, out: Any, steps: Any, fresh: Any) -> Any:
        def generate(builder: Any, arguments: Any) -> None:
            way(builder, *arguments).generate()

        return types.void(left, right, out, int64, int64), returns_void(generate)

    return multiply


class _Emitted:
    """Operands of a product, while its code is generated."""

    def __init__(self, builder: Any, left: Any, right: Any, out: Any, steps: Any, fresh: Any) -> None:
        def fields(value: Any, count: int) -> list[Any]:
            return [builder.extract_value(value, number) for number in range(count)]

        start, self.left_pitch, apart, self.parts, self.part = fields(left, len(LeftAt._fields))
        self.left = start, builder.add(start, apart)
        start, self.right_pitch, apart, self.right_step = fields(right, len(RightAt._fields))
        self.right = start, builder.add(start, apart)
        start, self.out_pitch, down = fields(out, len(OutAt._fields))
        self.out = [[row, builder.add(row, i64_const(4 * TILE))] for row in (start, builder.add(start, down))]
        self.builder, self.steps = builder, steps
        self.is_fresh = builder.icmp_signed("!=", fresh, i64_const(0))

    def at(self, start: Any, number: Any, distance: Any) -> Any:
        """start + number * distance."""
        return self.builder.add(start, self.builder.mul(number, distance))


class ByTiles(_Emitted):
    """By Intel's instructions."""

    instruction = "tdpbf16ps"

    def generate(self) -> None:
        builder = self.builder
        places = [(number, self.out[i][j]) for i, row in enumerate(_SUMS) for j, number in enumerate(row)]
        with builder.if_else(self.is_fresh) as (fresh, more):
            with fresh:
                for number, _ in places:
                    _call(builder, "tilezero", ir.Constant(I8, number))
            with more:
                for number, place in places:
                    self._load(number, place, self.out_pitch)
        with for_range(builder, self.steps) as step:
            for number, start in zip(_RIGHT, self.right, strict=True):
                self._load(number, self.at(start, step, self.right_step), self.right_pitch)
            with for_range(builder, self.parts) as part:
                for number, start in zip(_LEFT, self.left, strict=True):
                    begin = self.at(start, step, i64_const(4 * TILE))
                    self._load(number, self.at(begin, part, self.part), self.left_pitch)
                for row, left in zip(_SUMS, _LEFT, strict=True):
                    for number, right in zip(row, _RIGHT, strict=True):
                        _call(builder, self.instruction, *(ir.Constant(I8, n) for n in (number, left, right)))
        for number, place in places:
            _call(builder, "tilestored64", *self._memory(number, place, self.out_pitch))

    def _load(self, number: int, address: Any, pitch: Any) -> None:
        _call(self.builder, "tileloadd64", *self._memory(number, address, pitch))

    def _memory(self, number: int, address: Any, pitch: Any) -> tuple[Any, ...]:
        return ir.Constant(I8, number), self.builder.inttoptr(address, I8.as_pointer()), pitch


class IntegersByTiles(ByTiles):
    """int8 by Intel's instructions."""

    instruction = "tdpbssd"


class ByVectors(_Emitted):
    """The same sums by vectors: for tests on other processors."""

    def generate(self) -> None:
        builder, v = self.builder, Lanes(self.builder)
        total = v.variable(0.0)
        for i, j in ((i, j) for i in range(2) for j in range(2)):
            with for_range(builder, i64_const(TILE)) as row:
                place = self.at(self.out[i][j], row, self.out_pitch)
                builder.store(v.constant(0.0), total)
                with builder.if_then(builder.not_(self.is_fresh)):
                    builder.store(v.load(place, i64_const(0)), total)
                with for_range(builder, self.steps) as step, for_range(builder, self.parts) as part:
                    left = self.at(self.at(self.left[i], row, self.left_pitch), step, i64_const(4 * TILE))
                    right = self.at(self.right[j], step, self.right_step)
                    self._add_step(v, self.at(left, part, self.part), right, total)
                v.store(builder.load(total), place, i64_const(0))

    def _add_step(self, v: Lanes, left: Any, right: Any, total: Any) -> None:
        """total += a row of the left side's tile times the right side's."""
        builder, even, odd = self.builder, v.variable(0.0), v.variable(0.0)
        with for_range(builder, i64_const(TILE)) as pair:
            a, b = v.broadcast(v.load_scalar(left, pair)), v.load(self.at(right, pair, self.right_pitch), i64_const(0))
            for which, x, y in zip((odd, even), v.halves(a), v.halves(b), strict=True):
                builder.store(v.call("fma", x, y, builder.load(which)), which)
        both = builder.fadd(builder.load(even), builder.load(odd))
        builder.store(builder.fadd(builder.load(total), both), total)


class IntegersByVectors(ByVectors):
    """The same of int8."""

    def _add_step(self, v: Lanes, left: Any, right: Any, total: Any) -> None:
        builder, words = self.builder, ir.VectorType(I32, WIDTH)
        with for_range(builder, i64_const(TILE)) as four:
            a, b = v.broadcast(v.load_scalar(left, four)), v.load(self.at(right, four, self.right_pitch), i64_const(0))
            sums = builder.bitcast(builder.load(total), words)
            for shift in (24, 16, 8, 0):
                x, y = (self._byte(builder.bitcast(each, words), shift) for each in (a, b))
                sums = builder.add(sums, builder.mul(x, y))
            builder.store(builder.bitcast(sums, V16), total)

    def _byte(self, x: Any, shift: int) -> Any:
        """The byte of every word that `shift` bits move to its top, with its sign."""
        amounts = [ir.Constant(x.type, [bits] * WIDTH) for bits in (shift, 24)]
        return self.builder.ashr(self.builder.shl(x, amounts[0]), amounts[1])


def _call(builder: Any, name: str, *operands: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [operand.type for operand in operands])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), operands)


multiply = multiplied_by(ByTiles if AMX else ByVectors)
multiply_integers = multiplied_by(IntegersByTiles if AMX_INT8 else IntegersByVectors)
