"""The int8 linear layer compiled: the first of several products that takes the operands."""

from __future__ import annotations

from functools import partial

import torch

from glm5_kernels import int8
from glm5_kernels.compiled import bf16_linear, bf16_rows, int8_amx
from glm5_kernels.compiled.int8_grouped import grouped_product, of_layer, one_group, quantized, takes_weight
from glm5_kernels.compiled.int8_product import MAX_TOKENS, matmul
from glm5_kernels.compiled.int8_quantize import FLOATS, quantize, scale_back_to, takes_rows
from glm5_kernels.int8_linear import reference

#: int32 sums that are scaled back together, about what a cache holds; in pieces of at least so many weight rows,
#: because torch's product is slow with fewer.
_SUMS, _MIN_ROWS = 2**22, 512


def apply_linear(x: torch.Tensor, w: int8.LinearWeights, dtype: torch.dtype) -> torch.Tensor:
    """See `int8.apply_linear`: x [T, K] -> [T, N] in `dtype`."""
    if w.quant_mode == int8.NO_QUANT or w.scale is None:
        if x.dtype == dtype and bf16_linear.widens(x, w.weight):
            return bf16_linear.apply_linear(x, w.weight)
        if x.dtype == dtype and bf16_rows.takes(x[:, None], w.weight[None]):
            return bf16_rows.per_head(x[:, None], w.weight[None])[:, 0]
        return int8.apply_linear(x, w, dtype)
    tokens = x.shape[0]
    if 0 < tokens <= MAX_TOKENS and dtype in FLOATS and takes_rows(x) and takes_weight(w.weight, w.scale):
        static = w if w.quant_mode == int8.PER_TENSOR else None
        return grouped_product(quantized(x, static), one_group(tokens), of_layer(w.weight, w.scale), dtype)
    if int8_amx.takes(w.weight, dtype):
        codes, factors = quantize(x, w)
        return int8_amx.multiply(codes, factors, w.weight, w.scale, dtype, w.quant_bias)
    return _by_library(x, w, w.scale, dtype)


def _by_library(x: torch.Tensor, w: int8.LinearWeights, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The product of `int8_product.matmul`, with int32 sums of a part of the weight rows at a time."""
    codes, factors = quantize(x, w)
    out = torch.empty(len(x), len(w.weight), dtype=dtype)
    size = max(_MIN_ROWS, _SUMS // max(len(x), 1) // _MIN_ROWS * _MIN_ROWS)
    for first in range(0, len(w.weight), size):
        rows = slice(first, first + size)
        sums = matmul(codes, w.weight[rows])
        if w.quant_bias is not None:
            sums += w.quant_bias[rows]
        scale_back_to(out[:, rows], sums, factors, scale[rows])
    return out


int8_linear = partial(reference.int8_linear, apply=apply_linear)
