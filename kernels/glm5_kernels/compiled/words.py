"""Products of int16 pairs added in int32, where an x86 processor makes them faster than fp32 products.

VPDPWSSD multiplies two pairs per lane and adds both products; PMADDWD and PADDD are the same in two instructions. The
former is written as assembly: LLVM would take it apart into the latter wherever a sum waits for an earlier one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import llvmlite.binding
from llvmlite import ir
from numba.core import cgutils

from glm5_kernels.compiled.processor import features
from glm5_kernels.compiled.simd import I16, I32, PAIRS, V16, WIDTH, Lanes


class Words(NamedTuple):
    """An instruction: how many lanes it has, and how many rows at once fill the registers.

    add(builder, a, b, total): int32 lanes, each of which holds two int16 in `a` and `b`.
    """

    lanes: int
    rows: int
    add: Callable[[Any, Any, Any, Any], Any]


def _vpdpwssd(builder: Any, a: Any, b: Any, total: Any) -> Any:
    llvmlite.binding.initialize_native_asmparser()
    kind = ir.FunctionType(total.type, [total.type] * 3)
    return builder.asm(kind, "vpdpwssd $2, $1, $0", "=v,v,v,0", [a, b, total], False)


def _vpdpwssd_of_avx(builder: Any, a: Any, b: Any, total: Any) -> Any:
    llvmlite.binding.initialize_native_asmparser()
    kind = ir.FunctionType(total.type, [total.type] * 3)
    return builder.asm(kind, "{vex} vpdpwssd $2, $1, $0", "=x,x,x,0", [a, b, total], False)


def _pmaddwd(builder: Any, a: Any, b: Any, total: Any) -> Any:
    pairs = ir.VectorType(I16, 2 * total.type.count)
    signature = ir.FunctionType(total.type, [pairs, pairs])
    multiply = cgutils.get_or_insert_function(builder.module, signature, "llvm.x86.avx2.pmadd.wd")
    return builder.add(total, builder.call(multiply, [builder.bitcast(x, pairs) for x in (a, b)]))


def _chosen() -> Words | None:
    found = features()
    if PAIRS or "avx2" not in found:
        return None
    if "avx512f" in found:  # PMADDWD and PADDD take as long as fp32 products: both have two ports for 512 bits
        return Words(16, 8, _vpdpwssd) if "avx512vnni" in found else None
    return Words(8, 6, _vpdpwssd_of_avx) if "avxvnni" in found else Words(8, 4, _pmaddwd)


#: None: products of fp32, or of bf16 pairs, are as fast.
WORDS = _chosen()


def add_words(v: Lanes, a: Any, b: Any, total: Any) -> Any:
    """total + the products of two int16 in each lane of a and b: int32 lanes, all of them fp32 in name only."""
    assert WORDS is not None
    builder, whole, parts = v.builder, ir.VectorType(I32, WIDTH), []
    operands = [builder.bitcast(x, whole) for x in (a, b, total)]
    for start in range(0, WIDTH, WORDS.lanes):
        order = ir.Constant(ir.VectorType(I32, WORDS.lanes), list(range(start, start + WORDS.lanes)))
        parts.append(WORDS.add(builder, *(builder.shuffle_vector(x, x, order) for x in operands)))
    joined = builder.shuffle_vector(parts[0], parts[-1], ir.Constant(whole, list(range(WIDTH))))
    return builder.bitcast(joined, V16)
