"""int8 linear layer: y = x W^T with int8 weights and activations, exact int32 sums, one rounding at the end.

    W8A8_DYNAMIC ("per_token_quant_symm"):     s_x = max|row| / 127;  x_q = round(x / s_x)
                                               y = (x_q W_q^T) * s_x * weight_scale
    W8A8 static ("per_tensor_quant_asymm"):    x_q = round(x / input_scale + input_offset)
                                               y = (x_q W_q^T + quant_bias) * deq_scale

x_q saturates at -128..127, ties to even. `no_quant` is accepted and is an ordinary matmul.

Source: vllm-ascend `quantization/methods/w8a8_dynamic.py`, `w8a8_static.py` (semantics).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from glm5_kernels.contract import require_shape
from glm5_kernels.int8 import LinearWeights, apply_linear


class Int8Linear(NamedTuple):
    """x times the quantized weight [N, K] transposed: [..., N] in x's dtype."""

    x: Annotated[Tensor, "float [..., K]"]
    w: LinearWeights

    def rules(self) -> None:
        require_shape("w.weight", self.w.weight, (len(self.w.weight), self.x.shape[-1]))


def int8_linear(
    operands: Int8Linear,
    apply: Callable[[torch.Tensor, LinearWeights, torch.dtype], torch.Tensor] = apply_linear,
) -> torch.Tensor:
    x, w = operands
    if x.ndim == 2:
        return apply(x, w, x.dtype)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return apply(rows, w, x.dtype).reshape(*x.shape[:-1], len(w.weight))
