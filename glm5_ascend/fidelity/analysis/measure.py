"""Errors of one rounded linear on real inputs.

With X the inputs, W the weight and dW the change by rounding: output error |Xq Wq^T - X W^T| / |X W^T| (weights and
int8 activations), weight error |X dW^T| / |X W^T|, which is sqrt(tr(dW H dW^T) / tr(W H W^T)) with H = X^T X, and
activation error |(Xq - X) W^T| / |X W^T|. Norms are Frobenius; X are rows spread over the calibration text.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from glm5_ascend.checkpoint import schemes
from glm5_ascend.quantize.methods.input_statistics import InputStatistics
from glm5_ascend.quantize.methods.method import Method, RoundingState
from glm5_ascend.quantize.methods.rounding import quantize_linear
from glm5_ascend.quantize.methods.smoothing import quantize_activation

_BLOCK = 2**22


@dataclass(frozen=True)
class Outliers:
    """Largest |x| / rms of a tensor, and its kurtosis E x^4 / (E x^2)^2 (3 for a normal distribution)."""

    peak: float
    kurtosis: float

    @classmethod
    def of(cls, x: torch.Tensor) -> Outliers:
        peak = second = fourth = 0.0
        for piece in x.flatten().split(_BLOCK):  # fp64 copies of a whole weight would be the largest thing in memory
            square = piece.double().square()
            peak = max(peak, float(square.max()))
            second, fourth = second + float(square.sum()), fourth + float(square.square().sum())
        if second == 0:
            return cls(0.0, 0.0)
        mean = second / x.numel()
        return cls((peak / mean) ** 0.5, fourth / x.numel() / mean**2)


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


@dataclass(frozen=True)
class LinearErrors:
    """Relative errors of one linear, defined in the module's docstring."""

    output: float
    weight: float
    activation: float


def linear_errors(linear: RoundedLinear, weight: torch.Tensor, x: torch.Tensor) -> LinearErrors:
    """Errors against the float `weight` [N, K] on inputs `x` [T, K], both smoothed."""
    expected = x @ weight.T
    norm = expected.norm().clamp_min(1e-30)
    x_q = linear.activations(x)
    return LinearErrors(
        float((x_q @ linear.weight.T - expected).norm() / norm),
        float((x @ (linear.weight - weight).T).norm() / norm),
        float(((x_q - x) @ weight.T).norm() / norm),
    )
