"""The scale searches: what they must improve, what they must never worsen, and their memory of the inputs."""

from __future__ import annotations

import pytest
import torch

from glm5_ascend.checkpoint import schemes
from glm5_ascend.quantize.methods.input_statistics import InputStatistics, spread
from glm5_ascend.quantize.methods.method import LARGEST
from glm5_ascend.quantize.methods.minmax import MINMAX
from glm5_ascend.quantize.methods.smoothing import flex_awq_ssz, flex_smooth_quant, quantize_activation
from glm5_ascend.quantize.methods.ssz import SSZ
from tests.quantize.methods.test_rounding_rules import round_int


def inputs(tokens: int, channels: int, outliers: float) -> torch.Tensor:
    x = torch.randn(tokens, channels)
    x[:, :3] *= outliers  # a few loud channels, as language models have
    return x


def statistics(x: torch.Tensor) -> InputStatistics:
    seen = InputStatistics(512, len(x))
    for chunk in x.split(100):
        seen.add(chunk)
    return seen


def output_error(
    weight: torch.Tensor, x: torch.Tensor, seen: InputStatistics, scheme: str, scale: torch.Tensor
) -> float:
    """Relative error of the quantized linear on tokens the search has not seen."""
    scaled = weight * scale
    method, bits = (SSZ, 4) if scheme == schemes.W4A8_DYNAMIC else (MINMAX, 8)
    step = method.scale(scaled, bits)
    output = quantize_activation(x, scheme, seen, scale) @ (round_int(scaled, step, LARGEST[bits]) * step).T
    exact = x @ weight.T
    return float((output - exact).norm() / exact.norm())


@pytest.mark.parametrize("scheme", [schemes.W8A8_DYNAMIC, schemes.W8A8])
def test_smoothing_tames_loud_activation_channels(scheme: str) -> None:
    weight, seen = torch.randn(96, 64), statistics(inputs(600, 64, 60.0))
    fresh = inputs(400, 64, 60.0)
    scale = flex_smooth_quant([weight[:48], weight[48:]], seen, scheme)
    before = output_error(weight, fresh, seen, scheme, torch.ones(64))
    assert output_error(weight, fresh, seen, scheme, scale) < 0.7 * before


def test_awq_protects_the_channels_that_carry_the_output() -> None:
    weight, seen = torch.randn(96, 64), statistics(inputs(600, 64, 12.0))
    fresh = inputs(400, 64, 12.0)
    scale = flex_awq_ssz(weight, seen, schemes.W4A8_DYNAMIC, steps=10)
    before = output_error(weight, fresh, seen, schemes.W4A8_DYNAMIC, torch.ones(64))
    assert output_error(weight, fresh, seen, schemes.W4A8_DYNAMIC, scale) < 0.97 * before


def test_statistics_do_not_depend_on_how_tokens_arrive() -> None:
    x = inputs(300, 16, 5.0)
    whole, pieces = InputStatistics.of(x, 512), statistics(x)
    for seen in (whole, pieces):
        assert torch.equal(seen.low, x.amin(0))
        assert torch.equal(seen.high, x.amax(0))
        torch.testing.assert_close(seen.mean_abs, x.abs().mean(0))
        assert torch.equal(seen.rows, x)
        assert seen.tokens == 300


def test_statistics_keep_a_bounded_number_of_rows_from_everywhere() -> None:
    seen, whole = InputStatistics(10, 1000), torch.arange(1000.0)[:, None].expand(1000, 4)
    for start in range(0, 1000, 100):
        seen.add(whole[start : start + 100])
    assert torch.equal(seen.rows, spread(whole, 10))
    rows = seen.rows[:, 0]
    assert len(rows) == 10
    assert rows.min() < 100
    assert rows.max() >= 900
