"""Products of 32 x 32 bf16 or int8 by AMX: four 16 x 16 tiles of sums, in registers of 1 KiB each.

Linux grants these registers to a process on request. Each thread configures their shape once per task.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils

from glm5_kernels.compiled.processor import features
from glm5_kernels.compiled.simd import I8, I32, V16, WIDTH, Lanes, call_llvm, i64_const, intrinsic

#: Rows of a tile, and columns of 32 bits: fp32 or two bf16.
TILE = 16
#: Rows and columns of a product.
SIDE = 2 * TILE
#: Registers: sums by row and column, then operands.
_SUMS, _LEFT, _RIGHT = ((0, 1), (2, 3)), (4, 5), (6, 7)
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # Linux: asm/prctl.h, asm/fpu/types.h


def _permitted() -> bool:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    refused: int = ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA)
    return refused == 0


#: True if the CPU has the instructions and this process may use them. Without them, vectors compute the same, except
#: for denormal numbers.
AMX = {"amx-tile", "amx-bf16", "avx512f"} <= features() and _permitted()
#: True if it has those for int8, too.
AMX_INT8 = AMX and "amx-int8" in features()


def fits(*sizes: int) -> bool:
    """True if all sizes are multiples of SIDE."""
    return not any(size % SIDE for size in sizes)


@intrinsic()
def configure(v: Lanes) -> None:
    """Configure eight registers of 16 rows of 64 bytes for this thread, until `release`."""
    if not AMX:
        return
    shape = [1, 0] + [0] * 14 + [64, 0] * 8 + [0] * 16 + [TILE] * 8 + [0] * 8  # palette 1; bytes of rows; rows
    config = cgutils.alloca_once_value(v.builder, ir.Constant(ir.ArrayType(I8, 64), shape))
    call_llvm(v.builder, ir.VoidType(), "x86.ldtilecfg", v.builder.bitcast(config, I8.as_pointer()))


@intrinsic()
def release(v: Lanes) -> None:
    """Clear the registers and their shape, as other code expects them."""
    if AMX:
        call_llvm(v.builder, ir.VoidType(), "x86.tilerelease")


class LeftAt(NamedTuple):
    """32 rows of bf16 or int8: two tiles at a distance of `apart`, with rows at a distance of `pitch`.

    With 2 `parts` the rows are sums of two terms; the second term is `part` bytes after the first. All in bytes.
    """

    start: int
    pitch: int
    apart: int
    parts: int
    part: int


class RightAt(NamedTuple):
    """32 columns of bf16 or int8, VNNI-packed: two tiles of 16 columns at a distance of `apart` bytes.

    A row of a tile holds pairs of bf16, or fours of int8, for as many columns of the left side. `pitch`: bytes from row
    to row; `step`: from the 16 rows of a step to those of the next one.
    """

    start: int
    pitch: int
    apart: int
    step: int


class OutAt(NamedTuple):
    """fp32 or int32 [32, 32]: `pitch` bytes from row to row, `down` bytes from row 0 to row 16."""

    start: int
    pitch: int
    down: int


def product_with(code: Any) -> Any:
    """The intrinsic out = left times right over `steps` times 64 bytes of the left's rows; unless `fresh`, out += that.

    Of each step of bf16 the even columns' products are added in order, and the odd ones'; then both to the sum before.
    """

    @intrinsic(left=None, right=None, out=None)
    def multiply(v: Lanes, left: Any, right: Any, out: Any, steps: Any, fresh: Any) -> None:
        code(v, left, right, out, steps, fresh).generate()

    return multiply


class _Emitted:
    """The operands of a product while its code is generated."""

    def __init__(self, v: Lanes, left: Any, right: Any, out: Any, steps: Any, fresh: Any) -> None:
        builder = v.builder

        def fields(value: Any, count: int) -> list[Any]:
            return [builder.extract_value(value, number) for number in range(count)]

        start, self.left_pitch, apart, self.parts, self.part = fields(left, len(LeftAt._fields))
        self.left = start, builder.add(start, apart)
        start, self.right_pitch, apart, self.right_step = fields(right, len(RightAt._fields))
        self.right = start, builder.add(start, apart)
        start, self.out_pitch, down = fields(out, len(OutAt._fields))
        self.out = [[row, builder.add(row, i64_const(4 * TILE))] for row in (start, builder.add(start, down))]
        self.v, self.builder, self.steps = v, builder, steps
        self.is_fresh = builder.icmp_signed("!=", fresh, i64_const(0))

    def at(self, start: Any, number: Any, distance: Any) -> Any:
        """start + number * distance."""
        return self.builder.add(start, self.builder.mul(number, distance))


class Bf16Tiles(_Emitted):
    """bf16 by AMX."""

    instruction = "tdpbf16ps"

    def generate(self) -> None:
        builder = self.builder
        tiles = [(number, self.out[i][j]) for i, row in enumerate(_SUMS) for j, number in enumerate(row)]
        with builder.if_else(self.is_fresh) as (fresh, more):
            with fresh:
                for number, _ in tiles:
                    call_llvm(builder, ir.VoidType(), "x86.tilezero", ir.Constant(I8, number))
            with more:
                for number, address in tiles:
                    self._load(number, address, self.out_pitch)
        with self.v.loop(self.steps) as step:
            for number, start in zip(_RIGHT, self.right, strict=True):
                self._load(number, self.at(start, step, self.right_step), self.right_pitch)
            with self.v.loop(self.parts) as part:
                for number, start in zip(_LEFT, self.left, strict=True):
                    begin = self.at(start, step, i64_const(4 * TILE))
                    self._load(number, self.at(begin, part, self.part), self.left_pitch)
                for row, left in zip(_SUMS, _LEFT, strict=True):
                    for number, right in zip(row, _RIGHT, strict=True):
                        registers = (ir.Constant(I8, n) for n in (number, left, right))
                        call_llvm(builder, ir.VoidType(), f"x86.{self.instruction}", *registers)
        for number, address in tiles:
            call_llvm(builder, ir.VoidType(), "x86.tilestored64", *self._memory(number, address, self.out_pitch))

    def _load(self, number: int, address: Any, pitch: Any) -> None:
        call_llvm(self.builder, ir.VoidType(), "x86.tileloadd64", *self._memory(number, address, pitch))

    def _memory(self, number: int, address: Any, pitch: Any) -> tuple[Any, ...]:
        return ir.Constant(I8, number), self.builder.inttoptr(address, I8.as_pointer()), pitch


class Int8Tiles(Bf16Tiles):
    """int8 by AMX."""

    instruction = "tdpbssd"


class Bf16Vectors(_Emitted):
    """bf16 by vectors, for tests on other CPUs."""

    def generate(self) -> None:
        builder, v = self.builder, self.v
        total = v.variable(0.0)
        for i, j in ((i, j) for i in range(2) for j in range(2)):
            with v.loop(i64_const(TILE)) as row:
                out = self.at(self.out[i][j], row, self.out_pitch)
                builder.store(v.constant(0.0), total)
                with builder.if_then(builder.not_(self.is_fresh)):
                    builder.store(v.load(out, i64_const(0)), total)
                with v.loop(self.steps) as step, v.loop(self.parts) as part:
                    left = self.at(self.at(self.left[i], row, self.left_pitch), step, i64_const(4 * TILE))
                    right = self.at(self.right[j], step, self.right_step)
                    self._add_step(self.at(left, part, self.part), right, total)
                v.store(builder.load(total), out, i64_const(0))

    def _add_step(self, left: Any, right: Any, total: Any) -> None:
        """total += a row of the left side's tile times the right side's."""
        builder, v = self.builder, self.v
        even, odd = v.variable(0.0), v.variable(0.0)
        with v.loop(i64_const(TILE)) as pair:
            a, b = v.broadcast(v.load_scalar(left, pair)), v.load(self.at(right, pair, self.right_pitch), i64_const(0))
            for which, x, y in zip((odd, even), v.halves(a), v.halves(b), strict=True):
                builder.store(v.call("fma", x, y, builder.load(which)), which)
        both = builder.fadd(builder.load(even), builder.load(odd))
        builder.store(builder.fadd(builder.load(total), both), total)


class Int8Vectors(Bf16Vectors):
    """int8 by vectors, for tests on other CPUs."""

    def _add_step(self, left: Any, right: Any, total: Any) -> None:
        builder, v, words = self.builder, self.v, ir.VectorType(I32, WIDTH)
        with v.loop(i64_const(TILE)) as four:
            a, b = v.broadcast(v.load_scalar(left, four)), v.load(self.at(right, four, self.right_pitch), i64_const(0))
            sums = builder.bitcast(builder.load(total), words)
            for shift in (24, 16, 8, 0):
                x, y = (self._byte(builder.bitcast(codes, words), shift) for codes in (a, b))
                sums = builder.add(sums, builder.mul(x, y))
            builder.store(builder.bitcast(sums, V16), total)

    def _byte(self, x: Any, shift: int) -> Any:
        """One byte of every 32-bit lane, sign-extended; `shift` moves it to the top."""
        amounts = [ir.Constant(x.type, [bits] * WIDTH) for bits in (shift, 24)]
        return self.builder.ashr(self.builder.shl(x, amounts[0]), amounts[1])


multiply = product_with(Bf16Tiles if AMX else Bf16Vectors)
multiply_integers = product_with(Int8Tiles if AMX_INT8 else Int8Vectors)
