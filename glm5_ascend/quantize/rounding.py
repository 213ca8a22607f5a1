"""From fp32 weights to stored integers and scales: the one place where a weight is rounded.

Every function takes W fp32 [N, K] (one row per output channel). Source: msModelSlim 26.1.0 (minmax, SSZ), at fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from glm5_ascend.checkpoint import schemes
from glm5_ascend.checkpoint.packing import pack_int4, scale_bias
from glm5_ascend.quantize.ssz import minmax_scale, ssz_scale

INT8_MAX, INT4_MAX = 127, 7


@dataclass(frozen=True)
class ActivationRange:
    """Smallest and largest value a linear's input took over all calibration tokens."""

    low: float
    high: float


def bf16(x: torch.Tensor) -> torch.Tensor:
    """`x` rounded to what the engine's bf16 parameter will hold, as fp32."""
    return x.to(torch.bfloat16).to(torch.float32)


def round_int(weight: torch.Tensor, scale: torch.Tensor, largest: int) -> torch.Tensor:
    """round-half-even(W / scale) clipped to [-largest-1, largest], still fp32."""
    return torch.round(weight / scale).clamp_(-largest - 1, largest)


def quantize_linear(
    module: str, weight: torch.Tensor, scheme: str, method: str = "minmax", activation: ActivationRange | None = None
) -> dict[str, torch.Tensor]:
    """All stored tensors of a linear under `scheme`, by suffix (`checkpoint/schemes.py` says which).

    Args:
        module: module name; decides the columns of scale_bias.
        method: how the weight scale is found: "minmax" or "ssz".
        activation: range of the input, for the static scheme W8A8 only.
    """
    if scheme == schemes.W4A8_DYNAMIC:
        return _w4a8(module, weight, method)
    # The engine rounds linear scales to bf16 while loading: round first, then compute the integers from that scale.
    scale = bf16(minmax_scale(weight, INT8_MAX) if method == "minmax" else ssz_scale(weight, INT8_MAX))
    q = round_int(weight, scale, INT8_MAX)
    stored = {"weight": q.to(torch.int8), "weight_scale": scale, "weight_offset": torch.zeros_like(scale)}
    if scheme == schemes.W8A8:
        if activation is None:
            raise ValueError(f"{module}: W8A8 needs an activation range")
        stored |= _static_input(q, scale, activation)
    return stored


def _w4a8(module: str, weight: torch.Tensor, method: str) -> dict[str, torch.Tensor]:
    scale = minmax_scale(weight, INT4_MAX) if method == "minmax" else ssz_scale(weight, INT4_MAX)
    q = round_int(weight, scale, INT4_MAX).to(torch.int8)
    return {
        "weight": pack_int4(q),
        "weight_scale": scale,
        "weight_offset": torch.zeros_like(scale),
        "scale_bias": scale_bias(q, scale, schemes.partial_sums(module)),
    }


def _static_input(q: torch.Tensor, scale: torch.Tensor, activation: ActivationRange) -> dict[str, torch.Tensor]:
    """Per-tensor asymmetric input quantization: x_q = round(x / input_scale + input_offset) in [-128, 127]."""
    input_scale, input_offset = static_input(activation)
    input_scale, input_offset = input_scale.to(q.device), input_offset.to(q.device)
    deq_scale = input_scale * scale.flatten()
    quant_bias = -input_offset.to(torch.int64) * q.sum(dim=1).to(torch.int64)  # the sum is below 2^24: exact in fp32
    return {
        "input_scale": input_scale,
        "input_offset": input_offset,
        "deq_scale": deq_scale,
        "quant_bias": quant_bias.to(torch.int32),
    }


def static_input(activation: ActivationRange) -> tuple[torch.Tensor, torch.Tensor]:
    """(input_scale, input_offset), both fp32 [1]; the scale is bf16-representable and never narrower than the range."""
    low, high = min(activation.low, 0.0), max(activation.high, 0.0)
    exact = torch.tensor([(high - low) / 255 if high > low else 1.0])
    scale = exact.to(torch.bfloat16)
    if scale.float() < exact:
        scale = torch.nextafter(scale, torch.full_like(scale, torch.inf))
    input_scale = scale.float()
    offset = (torch.round(-low / input_scale) - 128).clamp(-128, 127)
    return input_scale, offset
