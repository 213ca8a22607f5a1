"""The linear layers in C++: int8 (csrc/int8_linear.h), and unquantized ones."""

from __future__ import annotations

from functools import partial

import torch

from glm5_kernels import int8
from glm5_kernels import int8_linear as reference
from glm5_kernels.native import bf16_linear, head_products
from glm5_kernels.native.library import function
from glm5_kernels.native.rows import FLOATS, ROWS, as_rows, matrix


def apply_linear(x: torch.Tensor, w: int8.LinearWeights, dtype: torch.dtype) -> torch.Tensor:
    """See `int8.apply_linear`: x [T, K] -> [T, N] in `dtype`."""
    if w.quant_mode == int8.NO_QUANT or w.scale is None:
        if x.dtype == dtype and bf16_linear.reads_rows(x, w.weight):
            return head_products.by_rows(x[:, None], w.weight[None])[:, 0]
        if x.dtype == dtype and bf16_linear.widens(x, w.weight):
            return bf16_linear.apply_linear(x, w.weight)
        return int8.apply_linear(x, w, dtype)
    x, weight = as_rows(x, 1), w.weight if w.weight.stride(1) == 1 else w.weight.contiguous()
    scale = w.scale.float().contiguous()
    fields = (w.input_scale, w.input_offset) if w.quant_mode == int8.PER_TENSOR else ()
    static = [field.float().contiguous() for field in fields if field is not None]
    bias = w.quant_bias.contiguous() if static and w.quant_bias is not None else None
    y = torch.empty(len(x), len(weight), dtype=dtype if dtype in FLOATS else torch.float32)
    function("int8_linear", 2 * ROWS + "pippppiii")(
        *matrix(x), *matrix(y), weight.data_ptr(), weight.stride(0), scale.data_ptr(),
        *([field.data_ptr() for field in static] or (0, 0)), 0 if bias is None else bias.data_ptr(),
        *x.shape, len(weight),
    )  # fmt: skip
    return y.to(dtype)


int8_linear = partial(reference.int8_linear, apply=apply_linear)
