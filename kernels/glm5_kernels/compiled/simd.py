"""Sixteen fp32 lanes as one value: the compiled kernels are built of them.

numba has no vector types, LLVM has: an intrinsic built with `Lanes` says which lanes are added in which order, and LLVM
maps them to the registers of the machine (AVX-512, two of AVX2, four of SSE or NEON). So the order of a sum, and with
it every bit of it, does not depend on what the compiler's vectorizer makes of a loop on this or that machine.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import llvmlite.binding
import numba.extending
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import register_jitable
from numpy.typing import NDArray

from glm5_kernels.compiled.processor import features

WIDTH = 16
I8, I16, I32, I64, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
V16 = ir.VectorType(F32, WIDTH)
_FEATURES = features()
#: Element kinds, as the compiled code passes them (int64).
FP32, BF16, INT8 = 0, 1, 2
#: True if the CPU multiplies bf16, two products per lane and instruction.
PAIRS = "avx512bf16" in _FEATURES and llvmlite.binding.llvm_version_info[0] >= 16
#: Rows times lane groups of a product held in registers: their sums, the groups and a broadcast fit 32 or 16 of them.
HEADS, GROUPS = (8, 2) if "avx512f" in _FEATURES else (4, 1)
#: Rows of the last block of a product whose rows are no multiple of HEADS.
FEWER = HEADS // 2
#: Terms of a sum added per iteration of an innermost loop.
UNROLLED = 4
#: Columns of a product held in registers.
STEP = WIDTH * GROUPS


@register_jitable  # type: ignore[untyped-decorator]
def in_steps(keys: Any) -> Any:
    """`keys`, rounded up to whole steps."""
    return -(-keys // STEP) * STEP


@register_jitable  # type: ignore[untyped-decorator]
def aligned_fp32(size: int) -> NDArray[np.float32]:
    """Uninitialised fp32 buffer [size], 64-byte aligned: a load that crosses cache lines takes twice as long."""
    buffer = np.empty(size + WIDTH, np.float32)
    start = -buffer.ctypes.data % 64 // 4
    return buffer[start : start + size]


class _Bf16(ir.types._BaseFloatType):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite lacks."""

    null, intrinsic_name = "0.0", "bf16"

    def __str__(self) -> str:
        return "bfloat"

    def format_constant(self, value: float) -> str:
        """llvmlite asks every float type how to write a constant; the method must exist, though none is made."""
        raise NotImplementedError("no constants of this type are made")


class Lanes:
    """Emits vector code where a numba intrinsic is called."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def constant(self, value: float | list[float]) -> Any:
        """One number in all lanes, or a list of sixteen."""
        return ir.Constant(V16, value if isinstance(value, list) else [value] * WIDTH)

    def variable(self, value: float) -> Any:
        """Stack slot of sixteen lanes, set to `value` whenever control passes here."""
        slot = cgutils.alloca_once(self.builder, V16)
        self.builder.store(self.constant(value), slot)
        return slot

    @contextmanager
    def loop(self, count: Any) -> Iterator[Any]:
        """A loop whose index (int64) runs from 0 to `count`."""
        with cgutils.for_range(self.builder, count) as loop:
            yield loop.index

    @contextmanager
    def lane_groups(self, count: Any) -> Iterator[Any]:
        """A loop over `count` groups of sixteen elements; its value (int64) is the index of a group's first element."""
        with self.loop(count) as group:
            yield self.builder.mul(group, i64_const(WIDTH))

    def broadcast(self, value: Any) -> Any:
        """One number, fp32 or an integer of any size, in all lanes."""
        empty = ir.Constant(ir.VectorType(value.type, WIDTH), ir.Undefined)
        first = self.builder.insert_element(empty, value, ir.Constant(I32, 0))
        return self.builder.shuffle_vector(first, empty, ir.Constant(ir.VectorType(I32, WIDTH), [0] * WIDTH))

    def shuffle(self, value: Any, order: list[int]) -> Any:
        """Lane i of the result is lane order[i] of `value`."""
        empty = ir.Constant(V16, ir.Undefined)
        return self.builder.shuffle_vector(value, empty, ir.Constant(ir.VectorType(I32, WIDTH), order))

    def larger(self, x: Any, y: Any) -> Any:
        """The larger of both, y where one is NaN: one instruction, while LLVM's maxnum is three and loses a NaN."""
        return self.builder.select(self.builder.fcmp_ordered(">", x, y), x, y)

    def add_products(self, a: Any, b: Any, total: Any) -> Any:
        """total + a * b, rounded once."""
        return self.call("fmuladd", a, b, total)

    def add_pairs(self, a: Any, b: Any, total: Any, native: bool = PAIRS) -> Any:
        """total + the products of two bf16 in each lane of a and b (fp32 in name only): odd ones first, then even ones.

        Intel's VDPBF16PS; without it two roundings as well, so the same bits but for denormal numbers.
        """
        builder, pairs = self.builder, ir.VectorType(_BF16, 2 * WIDTH)
        if native:
            operands = total, builder.bitcast(a, pairs), builder.bitcast(b, pairs)
            return call_llvm(builder, V16, "x86.avx512bf16.dpbf16ps.512", *operands)
        halves = self.halves(a), self.halves(b)
        for x, y in zip(*halves, strict=True):
            total = self.call("fma", x, y, total)
        return total

    def halves(self, pairs: Any) -> tuple[Any, Any]:
        """The odd and the even ones of two bf16 in each lane (fp32 in name only), as fp32."""
        builder, words = self.builder, ir.VectorType(I32, WIDTH)
        bits = builder.bitcast(pairs, words)
        upper = builder.and_(bits, ir.Constant(words, [0xFFFF0000] * WIDTH))
        lower = builder.shl(bits, ir.Constant(words, [16] * WIDTH))
        return builder.bitcast(upper, V16), builder.bitcast(lower, V16)

    def joined(self, even: Any, odd: Any) -> Any:
        """The inverse of `halves`."""
        words = ir.VectorType(I32, WIDTH)
        low, high = (self.builder.bitcast(x, words) for x in (even, odd))
        low = self.builder.lshr(low, ir.Constant(words, [16] * WIDTH))
        return self.builder.bitcast(self.builder.or_(low, high), V16)

    def reduce_lanes(self, combine: Callable[[Any, Any], Any], value: Any) -> Any:
        """All lanes combined into one fp32: lane i with lane i + 8, then by 4, 2 and 1."""
        for distance in (8, 4, 2, 1):
            value = combine(value, self.shuffle(value, [(lane + distance) % WIDTH for lane in range(WIDTH)]))
        return self.builder.extract_element(value, ir.Constant(I32, 0))

    def load_scalar(self, address: Any, index: Any) -> Any:
        """Element `index` of the fp32 array at `address`; any alignment."""
        value = self.builder.load(self.builder.gep(self.builder.inttoptr(address, F32.as_pointer()), [index]))
        value.align = 1
        return value

    def load(self, address: Any, index: Any) -> Any:
        """Elements index .. index + 15 of the fp32 array at `address` (int64); any alignment."""
        value = self.builder.load(self._pointer(address, index))
        value.align = 4
        return value

    def store(self, value: Any, address: Any, index: Any) -> None:
        self.builder.store(value, self._pointer(address, index)).align = 4

    def _pointer(self, address: Any, index: Any) -> Any:
        start = self.builder.inttoptr(address, F32.as_pointer())
        return self.builder.bitcast(self.builder.gep(start, [index]), V16.as_pointer())

    def call(self, name: str, *operands: Any) -> Any:
        """One of LLVM's intrinsics on vectors: fmuladd, rint, maxnum, minnum, fabs."""
        return call_llvm(self.builder, V16, f"{name}.v16f32", *operands)

    def transpose_16x16(self, rows: list[Any]) -> list[Any]:
        """Sixteen vectors as a 16 x 16 matrix, transposed by swapping blocks of 1, 2, 4 and 8."""
        order = ir.VectorType(I32, WIDTH)
        for size in (1, 2, 4, 8):
            swapped: list[Any] = [None] * WIDTH
            for low in (row for row in range(WIDTH) if not row & size):
                pair = rows[low], rows[low | size]
                first = [lane if not lane & size else lane - size + WIDTH for lane in range(WIDTH)]
                second = [lane + size if not lane & size else lane + WIDTH for lane in range(WIDTH)]
                swapped[low] = self.builder.shuffle_vector(*pair, ir.Constant(order, first))
                swapped[low | size] = self.builder.shuffle_vector(*pair, ir.Constant(order, second))
            rows = swapped
        return rows

    def load_as_fp32(self, address: Any, index: Any, kind: Any) -> Any:
        """Elements index .. index + 15 of the array at `address` as fp32 lanes; kind (int64): FP32, BF16 or INT8."""
        builder, words = self.builder, ir.VectorType(I32, WIDTH)

        def load_integers(element: Any, size: int) -> Any:
            start = builder.add(address, builder.mul(index, i64_const(size)))
            value = builder.load(builder.inttoptr(start, ir.VectorType(element, WIDTH).as_pointer()))
            value.align = size
            return value

        lanes = cgutils.alloca_once(builder, V16)
        with builder.if_else(builder.icmp_signed("==", kind, i64_const(FP32))) as (fp32, narrow):
            with fp32:
                builder.store(self.load(address, index), lanes)
            with narrow, builder.if_else(builder.icmp_signed("==", kind, i64_const(BF16))) as (bf16, int8):
                with bf16:
                    wide = builder.shl(builder.zext(load_integers(I16, 2), words), ir.Constant(words, [16] * WIDTH))
                    builder.store(builder.bitcast(wide, V16), lanes)
                with int8:
                    builder.store(builder.sitofp(builder.sext(load_integers(I8, 1), words), V16), lanes)
        return builder.load(lanes)

    def store_as(self, x: Any, address: Any, index: Any, kind: Any) -> None:
        """Sixteen fp32 lanes to elements index .. index + 15; kind (int64): FP32 or BF16 (`rounded_to_bf16`)."""
        builder, words, halves = self.builder, ir.VectorType(I32, WIDTH), ir.VectorType(I16, WIDTH)
        with builder.if_else(builder.icmp_signed("!=", kind, i64_const(FP32))) as (bf16, fp32):
            with bf16:
                bits = builder.lshr(builder.bitcast(self.rounded_to_bf16(x), words), ir.Constant(words, [16] * WIDTH))
                start = builder.add(address, builder.mul(index, i64_const(2)))
                builder.store(builder.trunc(bits, halves), builder.inttoptr(start, halves.as_pointer())).align = 2
            with fp32:
                self.store(x, address, index)

    def rounded_to_bf16(self, x: Any) -> Any:
        """To the nearest bf16, ties to even, as fp32; NaN stays."""
        builder, words = self.builder, ir.VectorType(I32, WIDTH)
        bits = builder.bitcast(x, words)
        odd = builder.and_(builder.lshr(bits, ir.Constant(words, [16] * WIDTH)), ir.Constant(words, [1] * WIDTH))
        bits = builder.add(bits, builder.add(odd, ir.Constant(words, [0x7FFF] * WIDTH)))
        rounded = builder.bitcast(builder.and_(bits, ir.Constant(words, [0xFFFF0000] * WIDTH)), V16)
        return builder.select(builder.fcmp_unordered("uno", x, x), self.constant(math.nan), rounded)


_Bf16._create_instance()
_BF16 = _Bf16()


def call_llvm(builder: Any, returns: Any, name: str, *operands: Any) -> Any:
    """One of LLVM's intrinsics."""
    signature = ir.FunctionType(returns, [operand.type for operand in operands])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, f"llvm.{name}"), operands)


def shuffled(builder: Any, a: Any, b: Any, order: list[int]) -> Any:
    """Lanes order[0], order[1], ... of a and b, one after the other."""
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(order)), order))


def sum_each(builder: Any, add: Callable[[Any, Any], Any], vectors: list[Any]) -> Any:
    """A vector of len(vectors) lanes, the sum of each vector: every round halves the lanes of each sum."""
    count, lanes = len(vectors), vectors[0].type.count
    width, size = lanes, lanes  # lanes of a vector; of each sum in it
    while size > 1:
        pairs = zip(vectors[0::2], vectors[1::2], strict=True) if len(vectors) > 1 else [(vectors[0], vectors[0])]
        low = [lane for lane in range(2 * width) if lane % size < size // 2]
        if len(vectors) == 1:
            low, width = low[: len(low) // 2], width // 2
        high = [lane + size // 2 for lane in low]
        vectors = [add(*(shuffled(builder, a, b, order) for order in (low, high))) for a, b in pairs]
        size //= 2
    while len(vectors) > 1:  # more sums than a vector has lanes
        pairs = zip(vectors[0::2], vectors[1::2], strict=True)
        vectors = [shuffled(builder, a, b, list(range(2 * a.type.count))) for a, b in pairs]
    return shuffled(builder, vectors[0], vectors[0], list(range(count)))


def i64_const(value: int) -> Any:
    """An int64 constant."""
    return ir.Constant(I64, value)


def intrinsic(returns: Any = types.void, **kinds: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorator of `emit(lanes, *operands)`: a function for kernels. Where it is called, `emit` writes LLVM code.

    Args:
        returns: numba's type of the result.
        kinds: numba's types of operands, by name, or None for the type that a call has; others are int64.
    """

    def decorate(emit: Callable[..., Any]) -> Any:
        first, *parameters = inspect.signature(emit).parameters.values()

        def define(_: Any, *kinds_of_call: Any) -> Any:
            pairs = zip(parameters, kinds_of_call, strict=True)
            operands = [kinds.get(parameter.name, types.int64) or kind for parameter, kind in pairs]
            return returns(*operands), generate

        def generate(context: Any, builder: Any, _: Any, operands: Any) -> Any:
            value = emit(Lanes(builder), *operands)
            return context.get_dummy_value() if returns is types.void else value

        define.__name__, define.__doc__ = emit.__name__, emit.__doc__
        define.__signature__ = inspect.Signature([first, *parameters])  # type: ignore[attr-defined]
        return numba.extending.intrinsic(define)

    return decorate
