"""The inner loops of Sparse Flash Attention by AMX around its products: rows paired, softmax of columns."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import float32, int64, types
from numba.extending import intrinsic

from glm5_kernels.compiled.simd import (
    I16,
    I32,
    V16,
    WIDTH,
    Lanes,
    for_range,
    i64_const,
    returns_void,
    rounded_to_bf16,
)
from glm5_kernels.compiled.sparse_flash_attention_intrinsics import exponential

_PAIR, _WORDS = 2 * WIDTH, ir.VectorType(I32, WIDTH)
_HALVES = ir.VectorType(I16, _PAIR)


@intrinsic  # type: ignore[untyped-decorator]
def copy_and_pair(_: Any, even: Any, odd: Any, dims: Any, out: Any, out_pitch: Any, pairs: Any) -> Any:
    """Copy two rows of bf16 [dims] to out and out + out_pitch bytes; pairs [dims, 2] <- their columns interleaved.

    `dims` is a multiple of 32.
    """

    def generate(builder: Any, arguments: Any) -> None:
        even, odd, dims, out, out_pitch, pairs = arguments
        orders = [[i // 2 + start + _PAIR * (i % 2) for i in range(_PAIR)] for start in (0, WIDTH)]

        def at(address: Any, offset: Any) -> Any:
            return builder.inttoptr(builder.add(address, offset), _HALVES.as_pointer())

        with for_range(builder, builder.sdiv(dims, i64_const(_PAIR))) as group:
            offset = builder.mul(group, i64_const(2 * _PAIR))
            rows = [builder.load(at(row, offset)) for row in (even, odd)]
            for row, target in zip(rows, (out, builder.add(out, out_pitch)), strict=True):
                row.align = 2
                builder.store(row, at(target, offset)).align = 2
            for number, order in enumerate(orders):
                both = builder.shuffle_vector(*rows, ir.Constant(ir.VectorType(I32, _PAIR), order))
                target = builder.add(builder.mul(offset, i64_const(2)), i64_const(2 * _PAIR * number))
                builder.store(both, at(pairs, target)).align = 2

    return types.void(*[int64] * 6), returns_void(generate)


@intrinsic  # type: ignore[untyped-decorator]
def softmax_columns(
    _: Any, scores: Any, pitch: Any, keys: Any, pairs: Any, scale: Any, parts: Any, peak: Any, total: Any, factor: Any
) -> Any:  # fmt: skip
    """Sixteen columns of scores fp32 [2 * pairs, pitch], of which `keys` rows count -> unnormalised probabilities.

    Row 2 i gets those of rows 2 i and 2 i + 1 as a pair of bf16; with `parts` of 2, row 2 i + 1 gets their rounding
    errors.
    Peak, total and factor are the online softmax's maximum, sum, and factor of the earlier sum.
    """

    def generate(builder: Any, arguments: Any) -> None:
        scores, pitch, keys, pairs, scale, parts, peak, total, factor = arguments
        v, zero = Lanes(builder), i64_const(0)
        scale, before, double = v.broadcast(scale), v.load(peak, zero), builder.mul(pitch, i64_const(2))
        best, added = v.variable(0.0), v.variable(0.0)
        builder.store(before, best)
        with for_range(builder, keys) as key:
            offset = builder.mul(key, pitch)
            x = builder.fmul(v.load(scores, offset), scale)
            v.store(x, scores, offset)
            builder.store(v.larger(builder.load(best), x), best)
        with for_range(builder, builder.sub(builder.mul(pairs, i64_const(2)), keys)) as key:  # no weight
            v.store(v.constant(float("-inf")), scores, builder.mul(builder.add(keys, key), pitch))
        highest = builder.load(best)
        with for_range(builder, pairs) as pair:
            offsets = [builder.add(builder.mul(pair, double), offset) for offset in (zero, pitch)]
            p = [exponential(v, builder.fsub(v.load(scores, offset), highest)) for offset in offsets]
            for x in p:
                builder.store(builder.fadd(builder.load(added), x), added)
            rounded = [rounded_to_bf16(v, x) for x in p]
            v.store(_as_pair(v, *rounded), scores, offsets[0])
            with builder.if_then(builder.icmp_signed("==", parts, i64_const(2))):
                left = [rounded_to_bf16(v, builder.fsub(x, y)) for x, y in zip(p, rounded, strict=True)]
                v.store(_as_pair(v, *left), scores, offsets[1])
        shrunk = exponential(v, builder.fsub(before, highest))
        v.store(builder.fadd(builder.fmul(v.load(total, zero), shrunk), builder.load(added)), total, zero)
        v.store(highest, peak, zero)
        v.store(shrunk, factor, zero)

    return types.void(*[int64] * 4, float32, *[int64] * 4), returns_void(generate)


def _as_pair(v: Lanes, even: Any, odd: Any) -> Any:
    """Two bf16 as fp32 -> both in 32 bits."""
    builder = v.builder
    low, high = (builder.bitcast(x, _WORDS) for x in (even, odd))
    return builder.bitcast(builder.or_(builder.lshr(low, ir.Constant(_WORDS, [16] * WIDTH)), high), V16)
