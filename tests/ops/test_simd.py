"""Vector code beside numpy."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pytest
from llvmlite import ir

from glm5_kernels.compiled.simd import I32, Lanes, i64_const, intrinsic, sum_each


@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_sum_of_each_vector(count: int, lanes: int) -> None:
    """Also where there are more sums than a vector has lanes: ARM's have four of int32."""

    @intrinsic()
    def sums(v: Lanes, x: Any, out: Any) -> None:
        builder, kind = v.builder, ir.VectorType(I32, lanes)
        rows = [builder.add(x, i64_const(4 * lanes * row)) for row in range(count)]
        vectors = [builder.load(builder.inttoptr(row, kind.as_pointer())) for row in rows]
        for vector in vectors:
            vector.align = 4
        total = sum_each(builder, builder.add, vectors)
        builder.store(total, builder.inttoptr(out, total.type.as_pointer())).align = 4

    x = np.random.default_rng(0).integers(-(2**20), 2**20, (count, lanes), np.int32)
    out = np.zeros(16, np.int32)
    numba.njit(lambda x, out: sums(x.ctypes.data, out.ctypes.data))(x, out)
    assert out.tolist() == x.sum(1).tolist() + [0] * (16 - count)
