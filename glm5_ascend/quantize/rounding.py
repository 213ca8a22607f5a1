"""From fp32 weights to stored integers and scales: the one place where a weight is rounded.

Every function takes W fp32 [N, K] (one row per output channel). Source: msModelSlim 26.1.0 (minmax, SSZ), at fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from glm5_ascend.checkpoint import schemes
from glm5_ascend.checkpoint.packing import pack_int4, scale_bias

INT8_MAX, INT4_MAX = 127, 7
_GRID = torch.linspace(0.2, 1.0, 24)  # below 0.2 nothing is gained, above it heavy-tailed rows lose

_BLOCK = 2**17  # weights per block of a search: what fits the processor's cache is read from memory once
_NOISE = 1e-6  # relative gain below which an iteration counts as converged


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


def minmax_scale(weight: torch.Tensor, largest: int) -> torch.Tensor:
    """max|row| / largest, [N, 1]; 1 for a row of zeros (its integers are zero whatever the scale)."""
    peak = weight.abs().amax(dim=1, keepdim=True)
    return torch.where(peak > 0, peak / largest, torch.ones_like(peak))


def ssz_scale(
    weight: torch.Tensor, steps: int = 50, largest: int = INT4_MAX, grid: torch.Tensor | None = _GRID
) -> torch.Tensor:
    """SSZ: per-row scale [N, 1] that minimises the squared error of symmetric integers.

    Starts from the best of a grid of clipped min-max scales, then alternates integers for fixed scale and the
    least-squares scale for fixed integers (`sum(wq)/sum(q^2)`) while any row's error falls. For the least-squares
    scale that error is `sum(w^2) - sum(wq)^2 / sum(q^2)`: one pass over the weights per candidate.
    """
    exact = weight if largest <= INT4_MAX else weight.double()  # int8 errors drown in the difference of fp32 sums
    block = max(1, _BLOCK // weight.shape[1])
    return torch.cat([_ssz_rows(rows, steps, largest, grid) for rows in exact.split(block)]).to(weight.dtype)


def _ssz_rows(weight: torch.Tensor, steps: int, largest: int, grid: torch.Tensor | None) -> torch.Tensor:
    start = minmax_scale(weight, largest)
    best, gain, q = start, torch.full_like(start, -1.0), torch.empty_like(weight)
    for ratio in torch.ones(1) if grid is None else grid:
        scale, new = _refit(weight, start * ratio, largest, q)
        best, gain = torch.where(new > gain, scale, best), torch.maximum(new, gain)
    for _ in range(steps):
        scale, new = _refit(weight, best, largest, q)
        better = new > gain * (1 + _NOISE)
        if not bool(better.any()):
            break
        best, gain = torch.where(better, scale, best), torch.where(better, new, gain)
    return best


def _refit(
    weight: torch.Tensor, scale: torch.Tensor, largest: int, q: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Least-squares scale [N, 1] for the integers that `scale` gives, and `sum(wq)^2 / sum(q^2)`; `q` is workspace."""
    torch.mul(weight, scale.reciprocal(), out=q).round_().clamp_(-largest - 1, largest)
    energy = torch.bmm(q[:, None], q[:, :, None])[:, 0]
    along = torch.bmm(weight[:, None], q[:, :, None])[:, 0]
    some = energy > 0
    energy = energy.clamp_min(1)
    return torch.where(some, along / energy, scale), along.square() / energy


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
    scale = bf16(minmax_scale(weight, INT8_MAX) if method == "minmax" else ssz_scale(weight, largest=INT8_MAX))
    q = round_int(weight, scale, INT8_MAX)
    stored = {"weight": q.to(torch.int8), "weight_scale": scale, "weight_offset": torch.zeros_like(scale)}
    if scheme == schemes.W8A8:
        if activation is None:
            raise ValueError(f"{module}: W8A8 needs an activation range")
        stored |= _static_input(q, scale, activation)
    return stored


def _w4a8(module: str, weight: torch.Tensor, method: str) -> dict[str, torch.Tensor]:
    scale = minmax_scale(weight, INT4_MAX) if method == "minmax" else ssz_scale(weight)
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
    deq_scale = input_scale * scale.flatten()
    quant_bias = -input_offset.to(torch.int64) * q.to(torch.int64).sum(dim=1)
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
