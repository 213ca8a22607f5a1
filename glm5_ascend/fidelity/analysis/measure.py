"""One rounded linear as the engine computes it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from glm5_ascend.checkpoint import schemes
from glm5_ascend.quantize.methods.input_statistics import InputStatistics
from glm5_ascend.quantize.methods.method import Method, RoundingState
from glm5_ascend.quantize.methods.rounding import quantize_linear
from glm5_ascend.quantize.methods.smoothing import quantize_activation


@dataclass
class RoundedLinear:
    """A linear as the engine will compute it, in fp32.

    Attributes:
        weight: dequantized, [N, K].
        statistics: of its inputs before smoothing. smooth: divisor of its inputs, [K].
    """

    scheme: str
    weight: torch.Tensor
    statistics: InputStatistics
    smooth: torch.Tensor

    def activations(self, x: torch.Tensor) -> torch.Tensor:
        """Smoothed inputs x [T, K] as the engine multiplies them: int8, dequantized."""
        if self.scheme == schemes.W8A8:
            return quantize_activation(x * self.smooth, self.scheme, self.statistics, self.smooth)
        return quantize_activation(x, self.scheme, self.statistics, torch.ones_like(self.smooth))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Smoothed inputs x [T, K] -> [T, N]."""
        return self.activations(x) @ self.weight.T


def round_linear(
    module: str,
    weight: torch.Tensor,
    scheme: str,
    method: Method,
    statistics: InputStatistics,
    smooth: torch.Tensor | None,
    state: RoundingState | None = None,
) -> RoundedLinear:
    """Round `weight` [N, K], already multiplied by `smooth`, as the quantizer does."""
    scale = torch.ones(weight.shape[1]) if smooth is None else smooth
    activation = statistics.range_after(scale) if scheme == schemes.W8A8 else None
    stored = quantize_linear(module, weight, scheme, method, activation, state).stored
    return RoundedLinear(scheme, schemes.dequantize(scheme, stored), statistics, scale)
