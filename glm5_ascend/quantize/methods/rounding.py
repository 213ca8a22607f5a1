"""From fp32 weights to stored integers and scales: the one place where a weight is rounded.

Every function takes W fp32 [N, K] (one row per output channel).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from glm5_ascend.checkpoint import schemes
from glm5_ascend.quantize.methods.method import Method, RoundingState
from glm5_ascend.quantize.methods.minmax import MINMAX
from glm5_kernels import ops


@dataclass(frozen=True)
class ActivationRange:
    """Smallest and largest value a linear's input took over all calibration tokens."""

    low: float
    high: float


def bf16(x: torch.Tensor) -> torch.Tensor:
    """`x` rounded to what the engine's bf16 parameter will hold, as fp32."""
    return x.to(torch.bfloat16).to(torch.float32)


class Rounded(NamedTuple):
    """The stored tensors of a linear by suffix (`checkpoint/schemes.py` says which), and what rounding cost.

    Attributes:
        per_row: one row, or half a packed one, for each row of the weight.
        per_tensor: one value for the whole linear.
        squared_error, squared_weight: sums of (W_deq - W)^2 and W^2.
    """

    per_row: dict[str, torch.Tensor]
    per_tensor: dict[str, torch.Tensor]
    squared_error: float
    squared_weight: float

    @property
    def stored(self) -> dict[str, torch.Tensor]:
        return self.per_row | self.per_tensor


def weight_bits(scheme: str) -> int:
    return 4 if scheme == schemes.W4A8_DYNAMIC else 8


def engine_scale(scheme: str, scale: torch.Tensor) -> torch.Tensor:
    """`scale` [N, 1] as the engine holds it: it rounds scales of INT8 weights to bf16 while loading.

    A row too small for any scale (its scale would be 0) is a row of zeros, with scale 1.
    """
    scale = bf16(scale) if weight_bits(scheme) == 8 else scale
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def quantize_linear(
    module: str,
    weight: torch.Tensor,
    scheme: str,
    method: Method = MINMAX,
    activation: ActivationRange | None = None,
    state: RoundingState | None = None,
) -> Rounded:
    """Round a linear's weight, or rows of it, under `scheme`.

    Args:
        module: module name; decides the columns of scale_bias.
        activation: range of the input, for the static scheme W8A8 only.
        state: of `method.prepare`; without it, integers are the nearest ones.
    """
    bits = weight_bits(scheme)
    # Rounded first, so that the integers are computed from the scale they will be multiplied by.
    scale = engine_scale(scheme, method.scale(weight, bits))
    parts = schemes.partial_sums(module) if bits == 4 else 1
    values = weight
    if state is not None:
        values, scale = state.round(weight, scale, bits)
    integers, sums, error, square = ops.round_rows(values, scale, bits, parts)
    if state is not None:
        square = float(torch.linalg.vector_norm(weight)) ** 2
        error = float(torch.linalg.vector_norm(values.sub_(weight))) ** 2
    per_row = {"weight": integers, "weight_scale": scale, "weight_offset": torch.zeros_like(scale)}
    per_tensor: dict[str, torch.Tensor] = {}
    if bits == 4:
        per_row["scale_bias"] = 8.0 * sums * scale  # undoes the +8 shift of the NPU's unsigned-nibble matmul
    if scheme == schemes.W8A8:
        if activation is None:
            raise ValueError(f"{module}: W8A8 needs an activation range")
        input_scale, input_offset = (value.to(scale.device) for value in static_input(activation))
        # x_q = round(x / input_scale + input_offset) in [-128, 127]; the offset's part of every sum is taken back.
        quant_bias = -input_offset.to(torch.int64) * sums[:, 0].to(torch.int64)
        per_row |= {"deq_scale": input_scale * scale.flatten(), "quant_bias": quant_bias.to(torch.int32)}
        per_tensor = {"input_scale": input_scale, "input_offset": input_offset}
    return Rounded(per_row, per_tensor, error, square)


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
