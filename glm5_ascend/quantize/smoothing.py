"""The two scale searches: Flex_Smooth_Quant (INT8 linears) and Flex_AWQ_SSZ (INT4 experts).

Source: SmoothQuant (arXiv 2211.10438), AWQ (arXiv 2306.00978), msModelSlim 26.1.0 `processor/anti_outlier/`. Unlike
msModelSlim, a candidate is scored with the arithmetic that will run (true per-token or per-tensor activations, the
statistic that is applied), and "do nothing" is always a candidate.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from glm5_ascend.checkpoint import schemes
from glm5_ascend.quantize.plan import SmoothPlan
from glm5_ascend.quantize.rounding import INT4_MAX, INT8_MAX, minmax_scale, round_int, ssz_scale, static_input
from glm5_ascend.quantize.statistics import InputStatistics, spread

#: Output rows a search looks at, evenly spaced: a scale belongs to input channels, which all rows share.
SEARCH_OUTPUTS = 512
_EXPONENTS = [step / 20 for step in range(21)]
_SMALLEST = 1e-5


def quantize_activation(x: torch.Tensor, scheme: str, fitted: InputStatistics, scale: torch.Tensor) -> torch.Tensor:
    """X / scale as the engine would see it after int8 quantization, dequantized: fp32 [T, K].

    A static range comes from `fitted`; what lies outside is clipped, as it will be at run time.
    """
    y = x / scale
    if scheme == schemes.W8A8:
        input_scale, offset = static_input(fitted.range_after(scale))
        return (torch.round(y / input_scale + offset).clamp_(-128, 127) - offset) * input_scale
    per_token = y.abs().amax(dim=1, keepdim=True).clamp_min(1e-10) / INT8_MAX
    return round_int(y, per_token, INT8_MAX) * per_token


def _distance(wanted: torch.Tensor, x_q: torch.Tensor, weight_q: torch.Tensor) -> float:
    """Relative error of the quantized output."""
    return float((x_q @ weight_q.T - wanted).norm() / wanted.norm().clamp_min(1e-20))


def search_scale(weights: list[torch.Tensor], statistics: InputStatistics, search: SmoothPlan) -> torch.Tensor:
    """Run the search a recipe asks for on the `weights` whose rounding it should care about."""
    if search.algorithm == "flex_awq_ssz":
        return flex_awq_ssz(weights[0], statistics, search.scheme, search.steps)
    return flex_smooth_quant(weights, statistics, search.scheme)


def flex_smooth_quant(weights: Iterable[torch.Tensor], statistics: InputStatistics, scheme: str) -> torch.Tensor:
    """Scale s [K] = max|X|^a / max|W|^b for the INT8 linears `weights` [N_i, K] that read the same input.

    Phase 1 searches a with b = 1-a, phase 2 searches b for the best a; ties go to the larger exponent. Statistics for
    the search come from the first half of the rows and the error is taken on the second half, other texts: scored on
    its own rows, a static range prefers scales that fill it to the last step and then clips on every new text.
    """
    weights = list(weights)
    fitted, x = statistics.split()
    w_max = torch.stack([torch.maximum(w.amax(0), -w.amin(0)) for w in weights]).amax(0).clamp_min(_SMALLEST)
    share = max(1, SEARCH_OUTPUTS // len(weights))
    weight = torch.cat([spread(w, share) for w in weights])

    wanted = x @ weight.T

    def scale_of(seen: InputStatistics, a: float, b: float) -> torch.Tensor:
        return _centred(seen.max_abs.clamp_min(_SMALLEST) ** a / w_max**b)

    def error_of(scale: torch.Tensor) -> float:
        scaled = weight * scale
        step = minmax_scale(scaled, INT8_MAX)
        weight_q = round_int(scaled, step, INT8_MAX) * step
        return _distance(wanted, quantize_activation(x, scheme, fitted, scale), weight_q)

    a, _ = _best((a, error_of(scale_of(fitted, a, 1 - a))) for a in _EXPONENTS)
    b, error = _best((b, error_of(scale_of(fitted, a, b))) for b in _EXPONENTS)
    identity = torch.ones_like(w_max)
    return scale_of(statistics, a, b) if error < error_of(identity) else identity


def flex_awq_ssz(weight: torch.Tensor, statistics: InputStatistics, scheme: str, steps: int) -> torch.Tensor:
    """Scale s [K] = mean|X|^alpha for an expert's down_proj `weight` [N, K]; alpha 0 means "do nothing"."""
    x, mean = statistics.rows, statistics.mean_abs.clamp_min(_SMALLEST)
    weight = spread(weight, SEARCH_OUTPUTS)
    wanted = x @ weight.T

    def error_of(alpha: float) -> float:
        scale = _centred(mean**alpha)
        scaled = weight * scale
        if scheme == schemes.W4A8_DYNAMIC:
            step, largest = ssz_scale(scaled, steps, grid=None), INT4_MAX
        else:
            step, largest = minmax_scale(scaled, INT8_MAX), INT8_MAX
        weight_q = round_int(scaled, step, largest) * step
        return _distance(wanted, quantize_activation(x, scheme, statistics, scale), weight_q)

    alpha, _ = _best((alpha, error_of(alpha)) for alpha in _EXPONENTS)
    return _centred(mean**alpha)


def _centred(scale: torch.Tensor) -> torch.Tensor:
    """Divide by the geometric mean: the common factor is free, this keeps both sides near their old magnitude."""
    return scale / scale.log().mean().exp()


def _best(candidates: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """(exponent, error) with the smallest error; the later, larger exponent on a tie."""
    chosen = (0.0, float("inf"))
    for exponent, error in candidates:
        if error <= chosen[1]:
            chosen = (exponent, error)
    return chosen
