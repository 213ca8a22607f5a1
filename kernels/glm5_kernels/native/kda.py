"""KDA in C++ (csrc/kda.h)."""

from __future__ import annotations

import torch

from glm5_kernels import kda as reference
from glm5_kernels.kda import Kda
from glm5_kernels.native.library import function
from glm5_kernels.native.rows import FLOATS, LANES, ROWS, as_int32, as_rows, rows


def kda(operands: Kda) -> torch.Tensor:
    q, k, v, g, beta, states, query_start_loc, initial_slots, state_slots = operands
    heads, keys, values = states.shape[1:]
    dense = states.stride()[1:] == (keys * values, values, 1)
    if not dense or q.dtype not in FLOATS or keys % LANES or values % LANES:
        return reference.kda(operands)
    q, k, v, g = map(as_rows, (q, k, v, g))
    tables = [as_int32(x) for x in (query_start_loc, initial_slots, state_slots)]
    beta, out = beta.contiguous(), q.new_empty(v.shape)
    function("kda", 5 * ROWS + "ppi" + "ppp" + "iiii")(
        *rows(q), *rows(k), *rows(v), *rows(g), *rows(out), beta.data_ptr(), states.data_ptr(), states.stride(0),
        *(table.data_ptr() for table in tables), len(initial_slots), heads, keys, values,
    )  # fmt: skip
    return out
