"""The two scale searches: Flex_Smooth_Quant (INT8 linears) and Flex_AWQ_SSZ (INT4 experts).

Source: SmoothQuant (arXiv 2211.10438), AWQ (arXiv 2306.00978), msModelSlim 26.1.0 `processor/anti_outlier/`. Unlike
msModelSlim, a candidate is scored with the arithmetic that will run (true per-token or per-tensor activations, the
statistic that is applied), and "do nothing" is always a candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from glm5_ascend.checkpoint import schemes
from glm5_ascend.quantize.methods.input_statistics import InputStatistics, spread
from glm5_ascend.quantize.methods.method import INT4_MAX, INT8_MAX
from glm5_ascend.quantize.methods.rounding import static_input
from glm5_ascend.quantize.plan import SmoothPlan
from glm5_kernels import ops

#: Output rows a search looks at, evenly spaced: a scale belongs to input channels, which all rows share.
SEARCH_OUTPUTS = 512
_SMALLEST = 1e-5
_STEPS = 20  # exponents are multiples of 1/20


def quantize_activation(x: torch.Tensor, scheme: str, fitted: InputStatistics, scale: torch.Tensor) -> torch.Tensor:
    """X / scale as the engine would see it after int8 quantization, dequantized: fp32 [T, K].

    A static range comes from `fitted`; what lies outside is clipped, as it will be at run time.
    """
    y = x / scale
    if scheme == schemes.W8A8:
        input_scale, offset = (value.item() for value in static_input(fitted.range_after(scale)))
        return (y / input_scale + offset).round_().clamp_(-128, 127).sub_(offset).mul_(input_scale)
    per_token = torch.maximum(y.amax(dim=1, keepdim=True), -y.amin(dim=1, keepdim=True)).clamp_min(1e-10) / INT8_MAX
    return y.div_(per_token).round_().mul_(per_token)


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
    output = x @ weight.T

    def scale_of(seen: InputStatistics, a: float, b: float) -> torch.Tensor:
        return _centred(seen.max_abs.clamp_min(_SMALLEST) ** a / w_max**b)

    def error_of(scale: torch.Tensor) -> float:
        x_q = quantize_activation(x, scheme, fitted, scale)
        return _output_error(output, x_q, ops.fake_round(weight, scale, INT8_MAX))

    a, _ = _best_exponent(lambda a: error_of(scale_of(fitted, a, 1 - a)))
    b, error = _best_exponent(lambda b: error_of(scale_of(fitted, a, b)))
    identity = torch.ones_like(w_max)
    return scale_of(statistics, a, b) if error < error_of(identity) else identity


def flex_awq_ssz(weight: torch.Tensor, statistics: InputStatistics, scheme: str, steps: int) -> torch.Tensor:
    """Scale s [K] = mean|X|^alpha for an expert's down_proj `weight` [N, K]; alpha 0 means "do nothing"."""
    x, mean = statistics.rows, statistics.mean_abs.clamp_min(_SMALLEST)
    weight = spread(weight, SEARCH_OUTPUTS)
    output = x @ weight.T
    largest, refits = (INT4_MAX, steps) if scheme == schemes.W4A8_DYNAMIC else (INT8_MAX, 0)

    def error_of(alpha: float) -> float:
        scale = _centred(mean**alpha)
        x_q = quantize_activation(x, scheme, statistics, scale)
        return _output_error(output, x_q, ops.fake_round(weight, scale, largest, refits))

    alpha, _ = _best_exponent(error_of)
    return _centred(mean**alpha)


def _output_error(output: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> float:
    """Squared error of x [T, K] times weight [N, K]^T against output [T, N]."""
    return float(torch.addmm(output, x, weight.T, beta=-1).square_().sum())


def _centred(scale: torch.Tensor) -> torch.Tensor:
    """Divide by the geometric mean: the common factor is free, this keeps both sides near their old magnitude."""
    return scale / scale.log().mean().exp()


def _best_exponent(error_of: Callable[[float], float]) -> tuple[float, float]:
    """(exponent in [0, 1], error) with the smallest error; the larger exponent on a tie.

    Errors are smooth in it up to the noise of rounding: every fourth step of 1/20 first, then around the best one.
    """
    errors: dict[int, float] = {}

    def best() -> int:
        return min(errors, key=lambda step: (errors[step], -step))

    for gap in (4, 2, 1):
        around = range(0, _STEPS + 1, gap) if not errors else (best() - gap, best() + gap)
        for step in around:
            if 0 <= step <= _STEPS and step not in errors:
                errors[step] = error_of(step / _STEPS)
    return best() / _STEPS, errors[best()]
