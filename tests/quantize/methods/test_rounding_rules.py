"""Rounding: what the engine's arithmetic assumes about integers and scales."""

from __future__ import annotations

import pytest
import torch

from glm5_ascend.checkpoint import schemes
from glm5_ascend.checkpoint.schemes import unpack_int4
from glm5_ascend.quantize.methods.method import INT4_MAX, INT8_MAX, LARGEST, Method
from glm5_ascend.quantize.methods.minmax import MINMAX
from glm5_ascend.quantize.methods.rounding import ActivationRange, quantize_linear, static_input
from glm5_ascend.quantize.methods.ssz import SSZ


def round_int(weight: torch.Tensor, scale: torch.Tensor, largest: int) -> torch.Tensor:
    """round-half-even(W / scale) clipped to [-largest-1, largest], still fp32."""
    return torch.round(weight / scale).clamp_(-largest - 1, largest)


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(32, 64, generator=generator)
    heavy = normal * torch.rand(32, 64, generator=generator).pow(-1.5)
    one_outlier = normal.clone()
    one_outlier[:, 7] = 50
    return {
        "normal": normal, "heavy": heavy, "one_outlier": one_outlier, "tiny": normal * 1e-6, "huge": normal * 1e6,
        "zero_rows": normal * (torch.arange(32) % 2)[:, None], "constant": torch.full((32, 64), 0.3),
        "integers": torch.randint(-7, 8, (32, 64), generator=generator).float(),
    }  # fmt: skip


@pytest.mark.parametrize("name", weights())
@pytest.mark.parametrize("bits", [4, 8])
def test_ssz_is_never_worse_than_min_max(name: str, bits: int) -> None:
    weight = weights()[name]

    def row_error(scale: torch.Tensor) -> torch.Tensor:
        return (round_int(weight, scale, LARGEST[bits]) * scale - weight).square().sum(1)

    scale = SSZ.scale(weight, bits)
    assert bool((scale > 0).all() & scale.isfinite().all())
    noise = 1e-9 * weight.square().sum(1)  # of the closed form, where min-max happens to be exact
    assert bool((row_error(scale) <= row_error(MINMAX.scale(weight, bits)) * (1 + 1e-6) + noise).all())


def test_ssz_gains_where_it_should() -> None:
    weight = weights()["heavy"]
    scales = SSZ.scale(weight, 4), MINMAX.scale(weight, 4)
    ssz, minmax = (float((round_int(weight, s, INT4_MAX) * s - weight).norm()) for s in scales)
    assert ssz < 0.95 * minmax


@pytest.mark.parametrize("name", weights())
@pytest.mark.parametrize("method", [MINMAX, SSZ])
@pytest.mark.parametrize("scheme", [schemes.W8A8_DYNAMIC, schemes.W8A8])
def test_linear_scales_are_what_the_engine_will_hold(name: str, method: Method, scheme: str) -> None:
    """The engine rounds linear scales to bf16: the integers must come from the rounded scale."""
    weight = weights()[name]
    stored = quantize_linear("x.o_proj", weight, scheme, method, ActivationRange(-3.0, 5.0)).stored
    scale = stored["weight_scale"]
    assert torch.equal(scale, scale.bfloat16().float())
    assert torch.equal(stored["weight"], round_int(weight, scale, INT8_MAX).to(torch.int8))
    assert not stored["weight_offset"].any()
    if method is MINMAX:
        error = (schemes.dequantize(schemes.W8A8_DYNAMIC, stored) - weight).abs()
        clipped = weight.abs().amax(1, keepdim=True) * 2**-8  # the rounded scale may fall short of the peak
        assert bool((error <= scale / 2 * 1.001 + clipped).all())


def test_static_linear_is_exact_integer_arithmetic() -> None:
    """y = (x_q W_q^T + quant_bias) * deq_scale equals the dequantized product."""
    weight, x = weights()["normal"], torch.randn(9, 64) + 0.7
    stored = quantize_linear(
        "x.o_proj", weight, schemes.W8A8, activation=ActivationRange(float(x.min()), float(x.max()))
    ).stored
    x_q = (x / stored["input_scale"] + stored["input_offset"]).round().clamp(-128, 127)
    y = (x_q.long() @ stored["weight"].long().T + stored["quant_bias"]).float() * stored["deq_scale"]
    x_back = (x_q - stored["input_offset"]) * stored["input_scale"]
    torch.testing.assert_close(y, x_back @ (stored["weight"].float() * stored["weight_scale"]).T, atol=1e-4, rtol=1e-4)
    assert float((y - x @ weight.T).norm() / (x @ weight.T).norm()) < 0.02
    assert stored["quant_bias"].dtype is torch.int32


@pytest.mark.parametrize(
    ("low", "high"), [(-3.7, 0.2), (2.0, 9.0), (-9.0, -2.0), (0.0, 0.0), (-1e-6, 1e-6), (-3e4, 7e4), (-255.1, 0.0)]
)
def test_static_input_covers_the_range(low: float, high: float) -> None:
    scale, offset = static_input(ActivationRange(low, high))
    assert scale.shape == offset.shape == (1,) and float(scale) > 0
    assert torch.equal(scale, scale.bfloat16().float())
    assert float(offset) == round(float(offset)) and -128 <= float(offset) <= 127
    for x in (low, high, 0.0):
        back = (torch.round(x / scale + offset).clamp(-128, 127) - offset) * scale
        assert abs(float(back) - x) <= float(scale) * 0.501, (x, float(back))  # nothing of the range is clipped
    assert float((torch.round(0 / scale + offset) - offset) * scale) == 0


def test_int4_stores_what_it_computed() -> None:
    weight = weights()["normal"]
    stored = quantize_linear("x.down_proj", weight, schemes.W4A8_DYNAMIC, SSZ).stored
    q = unpack_int4(stored["weight"])
    assert int(q.min()) >= -8 and int(q.max()) <= 7
    assert torch.equal(q, round_int(weight, stored["weight_scale"], INT4_MAX).to(torch.int8))
    expected = 8 * (q.float() * stored["weight_scale"]).reshape(32, 16, 4).sum(-1)
    torch.testing.assert_close(stored["scale_bias"], expected)
