"""int8 arithmetic shared by the quantized ops: quantize a row, multiply exactly, scale back.

Textbook integer quantization; the two activation modes are those of vllm-ascend's
`quantization/methods/w8a8_dynamic.py` and `w8a8_static.py` (semantics only).
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from glm5_kernels.errors import KernelInputError

NO_QUANT = "no_quant"
PER_TOKEN = "per_token_quant_symm"  # W8A8_DYNAMIC
PER_TENSOR = "per_tensor_quant_asymm"  # W8A8 with a static, calibrated input scale
#: The fields of `LinearWeights` that each mode needs besides the weight.
NEEDED: dict[str, tuple[str, ...]] = {
    NO_QUANT: (),
    PER_TOKEN: ("scale",),
    PER_TENSOR: ("scale", "input_scale", "input_offset", "quant_bias"),
}
QUANT_MODES = tuple(NEEDED)


class LinearWeights(NamedTuple):
    """One linear layer y = x W^T in one of `QUANT_MODES`; fields a mode does not use are None.

    weight is in the activation dtype (no_quant) or int8. scale is weight_scale (per_token), or deq_scale, which is
    input_scale * weight_scale (per_tensor). input_scale and input_offset quantize static activations; for quant_bias
    see `apply_linear`.
    """

    weight: Annotated[Tensor, "any [N, K]"]
    quant_mode: str = NO_QUANT
    scale: Annotated[Tensor | None, "float [N]"] = None
    input_scale: Annotated[Tensor | None, "float [1]"] = None
    input_offset: Annotated[Tensor | None, "float [1]"] = None
    quant_bias: Annotated[Tensor | None, "int32 [N]"] = None

    def rules(self) -> None:
        """Raise `KernelInputError` unless the fields are what the quant mode needs."""
        if self.quant_mode not in QUANT_MODES:
            raise KernelInputError(f"unknown quant mode {self.quant_mode!r}; known: {', '.join(QUANT_MODES)}")
        needed, kind = NEEDED[self.quant_mode], "int8 weights"
        fits = self.weight.dtype == torch.int8
        if self.quant_mode == NO_QUANT:
            fits, kind = self.weight.is_floating_point(), "a weight in fp32, bf16 or fp16"
        if not fits:
            raise KernelInputError(f"quant mode {self.quant_mode} needs {kind}, got {self.weight.dtype}")
        if any(getattr(self, name) is None for name in needed):
            raise KernelInputError(f"quant mode {self.quant_mode} needs {', '.join(needed)}")


def quantize_per_token(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K] -> int8 [T, K] and fp32 scales [T, 1]; scale = max|row| / 127, ties to even.

    A row with a NaN or an infinity gets zeros and a scale of NaN, so that all that is computed of it is NaN.
    """
    x = x.float()
    largest = torch.nn.functional.pad(x.abs(), (0, 1)).amax(dim=-1, keepdim=True)  # 0 of no columns
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


def unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    """Packed int8 [N/2, K] -> int8 [N, K], -8..7; a byte has an even row in its low half, the next in its high one."""
    low = (packed << 4) >> 4  # arithmetic shifts on int8 keep the sign
    return torch.stack([low, packed >> 4], dim=1).reshape(2 * packed.shape[0], packed.shape[1])


def scale_back(y: torch.Tensor, x_scale: torch.Tensor | None, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """int32 [T, N] times the scales [T, 1] of its tokens, if any, and [N] of its rows -> [T, N] in `dtype`."""
    scaled = y.float() if x_scale is None else y.float() * x_scale
    return (scaled * scale.float()).to(dtype)


def apply_linear(x: torch.Tensor, w: LinearWeights, dtype: torch.dtype) -> torch.Tensor:
    """x [T, K] times w transposed -> [T, N] in `dtype`, whatever the quant mode. no_quant multiplies in `dtype` itself.

    quant_bias holds -input_offset * sum_k W_q[n, k], which undoes the zero point of static quantization.
    """
    if w.quant_mode == NO_QUANT or w.scale is None:
        return torch.nn.functional.linear(x.to(dtype), w.weight)
    if w.quant_mode == PER_TOKEN:
        x_q, x_scale = quantize_per_token(x)
        return scale_back(int8_matmul(x_q, w.weight), x_scale, w.scale, dtype)
    assert w.input_scale is not None and w.input_offset is not None and w.quant_bias is not None
    x_q = quantize_per_tensor(x, w.input_scale, w.input_offset)
    return scale_back(int8_matmul(x_q, w.weight) + w.quant_bias, None, w.scale, dtype)
