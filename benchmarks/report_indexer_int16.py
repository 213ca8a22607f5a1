"""What int16 scores could gain for the Lightning Indexer where bf16 instructions are missing, at best.

    OMP_NUM_THREADS=1 python benchmarks/report_indexer_int16.py

Times the indexer's inner loop on a few keys in fp32 and with pairs of int16 (VPDPWSSD, of AVX-512 VNNI). Scores of
rounded operands only find candidates: those too close to the last chosen one must be scored again in fp32. The bound
counts nothing of that, nor the rounding of the keys, nor a second top-k.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import cgutils

from glm5_kernels.compiled.simd import I32, STEP, V16, WIDTH, Lanes, in_steps
from glm5_kernels.lightning_indexer.cpu_intrinsics import KEYS, _scores, scores_of_keys

HEADS, DIM, REPEATS = 32, 128, 20000
_WORDS = ir.VectorType(I32, WIDTH)


def add_words(v: Lanes, a: Any, b: Any, total: Any) -> Any:
    """total + the products of two int16 in each lane; fp32 in name only."""
    kind, builder = ir.FunctionType(_WORDS, [_WORDS] * 3), v.builder
    add = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.vpdpwssd.512")
    return builder.bitcast(builder.call(add, [builder.bitcast(x, _WORDS) for x in (total, a, b)]), V16)


def repeated(tile: Any) -> Callable[..., None]:
    @njit(nogil=True)  # type: ignore[untyped-decorator]
    def run(count: Any, rows: Any, query: Any, weights: Any, dims: Any, out: Any) -> None:
        for _ in range(count):
            tile(rows, query, weights, HEADS, in_steps(HEADS) // STEP, dims, out, 0, query, 0)

    made: Callable[..., None] = run
    return made


def main() -> int:
    weights, out = np.random.randn(HEADS).astype(np.float32), np.zeros(KEYS, np.float32)
    seconds = {}
    for name, tile, dtype, dims in (("fp32", scores_of_keys, "f4", DIM), ("int16", _scores(add_words), "i2", DIM // 2)):
        keys, query = (np.random.randint(-2000, 2000, (size, DIM)).astype(dtype) for size in (KEYS, in_steps(HEADS)))
        rows = np.array([key.ctypes.data for key in keys])
        run, given = repeated(tile), (rows.ctypes.data, query.ctypes.data, weights.ctypes.data, dims, out.ctypes.data)
        run(1, *given)
        times = []
        for _ in range(5):
            began = time.perf_counter()
            run(REPEATS, *given)
            times.append(time.perf_counter() - began)
        seconds[name] = min(times) / REPEATS
        print(f"{name:6} {seconds[name] * 1e6:6.2f} us for {KEYS} keys, {HEADS} heads of {DIM}")
    print(f"at most {seconds['fp32'] / seconds['int16']:.2f} x")
    return 0


if __name__ == "__main__":
    sys.exit(main())
