"""int8 arithmetic shared by the quantized ops: quantize a row, multiply exactly, scale back.

Textbook integer quantization; the two activation modes are those of vllm-ascend's
`quantization/methods/w8a8_dynamic.py` and `w8a8_static.py` (semantics only).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from glm5_kernels.errors import KernelInputError, require_floats, require_shape

NO_QUANT = "no_quant"
PER_TOKEN = "per_token_quant_symm"  # W8A8_DYNAMIC
PER_TENSOR = "per_tensor_quant_asymm"  # W8A8 with a static, calibrated input scale
QUANT_MODES = (NO_QUANT, PER_TOKEN, PER_TENSOR)


class LinearWeights(NamedTuple):
    """One linear layer y = x W^T in one of `QUANT_MODES`; fields a mode does not use are None.

    weight: [N, K]; activation dtype (no_quant) or int8.
    scale: fp32 [N]; weight_scale (per_token) or deq_scale = input_scale * weight_scale (per_tensor).
    input_scale, input_offset: [1], static activation quantization.
    quant_bias: int32 [N], see `multiply`.
    """

    weight: torch.Tensor
    quant_mode: str = NO_QUANT
    scale: torch.Tensor | None = None
    input_scale: torch.Tensor | None = None
    input_offset: torch.Tensor | None = None
    quant_bias: torch.Tensor | None = None


def quantize_per_token(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K] -> int8 [T, K] and fp32 scales [T, 1]; scale = max|row| / 127, ties to even.

    A row with a NaN or an infinity gets zeros and a scale of NaN, so that all that is computed of it is NaN.
    """
    x = x.float()
    largest = x.abs().amax(dim=-1, keepdim=True)
    scale = (largest.clamp_min(1e-8) / 127.0).masked_fill(~largest.isfinite(), float("nan"))
    return _rounded(x / scale), scale


def quantize_per_tensor(x: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """x [T, K] -> int8 [T, K]: round(x / scale + offset), saturating; scale and offset hold one element.

    Infinities saturate, NaN becomes 0: an integer cannot say more.
    """
    return _rounded(x.float() / scale.float() + offset.float())


def _rounded(x: torch.Tensor) -> torch.Tensor:
    return torch.round(x).clamp_(-128, 127).nan_to_num_(nan=0.0).to(torch.int8)


def int8_matmul(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """int8 [T, K] times int8 [N, K] transposed -> int32 [T, N], exact."""
    # Every sum is below 2^53. torch's own int8 product is a scalar loop on processors without VNNI (2 Gop/s: Zen 3).
    return (a.double() @ w.double().t()).to(torch.int32)


def scale_back(y: torch.Tensor, x_scale: torch.Tensor | None, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """int32 [T, N] times the scales [T, 1] of its tokens, if any, and [N] of its rows -> [T, N] in `dtype`."""
    scaled = y.float() if x_scale is None else y.float() * x_scale
    return (scaled * scale.float()).to(dtype)


class Arithmetic(NamedTuple):
    """The expensive functions of the quantized ops; the implementations differ in these only.

    matmul: int8 [T, K], int8 [N, K] -> int32 [T, N], exact.
    """

    matmul: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    quantize_per_token: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    quantize_per_tensor: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    scale_back: Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.dtype], torch.Tensor]


PLAIN = Arithmetic(int8_matmul, quantize_per_token, quantize_per_tensor, scale_back)


def quantize(
    x: torch.Tensor, w: LinearWeights, dtype: torch.dtype, arithmetic: Arithmetic = PLAIN
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x [T, K] as what `multiply` takes: in `dtype` (no_quant) or int8, and scales [T, 1] if each token has its own."""
    check(w)
    if w.quant_mode == NO_QUANT:
        return x.to(dtype), None
    if w.quant_mode == PER_TOKEN:
        return arithmetic.quantize_per_token(x)
    return arithmetic.quantize_per_tensor(x, w.input_scale, w.input_offset), None  # type: ignore[arg-type]


def check(w: LinearWeights) -> None:
    """Raise `KernelInputError` unless `w` has what its quant mode needs."""
    if w.quant_mode not in QUANT_MODES:
        raise KernelInputError(f"unknown quant mode {w.quant_mode!r}; known: {', '.join(QUANT_MODES)}")
    if w.quant_mode == NO_QUANT:
        return
    if w.weight.dtype != torch.int8:
        raise KernelInputError(f"quant mode {w.quant_mode} needs int8 weights, got {w.weight.dtype}")
    if w.scale is None and w.quant_mode == PER_TOKEN:
        raise KernelInputError(f"quant mode {PER_TOKEN} needs scale (the weight_scale of each output row)")
    if w.quant_mode == PER_TENSOR and any(x is None for x in (w.scale, w.input_scale, w.input_offset, w.quant_bias)):
        raise KernelInputError(f"quant mode {PER_TENSOR} needs scale, input_scale, input_offset and quant_bias")


def check_linear(name: str, w: LinearWeights, rows: int | None, columns: int) -> None:
    """Raise `KernelInputError` unless `w` has all its mode needs, in the sizes of a weight [rows, columns]."""
    require_shape(f"{name}.weight", w.weight, (rows, columns))
    check(w)
    if w.quant_mode == NO_QUANT:
        require_floats(**{f"{name}.weight": w.weight})
        return
    assert w.scale is not None
    require_shape(f"{name}.scale", w.scale, (w.weight.shape[0],))
    require_floats(**{f"{name}.scale": w.scale})
    if w.quant_mode == PER_TENSOR:
        assert w.quant_bias is not None and w.input_scale is not None and w.input_offset is not None
        require_shape(f"{name}.quant_bias", w.quant_bias, (len(w.weight),))
        if w.quant_bias.dtype != torch.int32:
            raise KernelInputError(f"{name}.quant_bias is {w.quant_bias.dtype}, expected int32")
        require_shape(f"{name}.input_scale", w.input_scale.reshape(-1), (1,))
        require_shape(f"{name}.input_offset", w.input_offset.reshape(-1), (1,))


def multiply(x_q: torch.Tensor, w: LinearWeights, arithmetic: Arithmetic = PLAIN) -> torch.Tensor:
    """x_q [T, K] times the weight [N, K] transposed, plus quant_bias: int32 [T, N], exact; no_quant: in its own dtype.

    quant_bias holds -input_offset * sum_k W_q[n, k], which undoes the zero point of static quantization.
    """
    if w.quant_mode == NO_QUANT:
        return torch.nn.functional.linear(x_q, w.weight)
    y = arithmetic.matmul(x_q, w.weight)
    return y if w.quant_bias is None else y + w.quant_bias


def dequantize(
    y: torch.Tensor, x_scale: torch.Tensor | None, w: LinearWeights, dtype: torch.dtype, arithmetic: Arithmetic = PLAIN
) -> torch.Tensor:
    """Scale the result of `multiply` back to `dtype`; no_quant needs nothing."""
    return y if w.scale is None else arithmetic.scale_back(y, x_scale, w.scale, dtype)


def apply_linear(x: torch.Tensor, w: LinearWeights, dtype: torch.dtype, arithmetic: Arithmetic = PLAIN) -> torch.Tensor:
    """x [T, K] -> [T, N] in `dtype`, whatever the quant mode. no_quant multiplies in `dtype` itself."""
    x_q, x_scale = quantize(x, w, dtype, arithmetic)
    return dequantize(multiply(x_q, w, arithmetic), x_scale, w, dtype, arithmetic)
