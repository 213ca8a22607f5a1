"""Fake quantization gives the bits of the stored checkpoint and of the server's arithmetic; its gradients are STE's."""

from __future__ import annotations

import pytest
import torch

from glm5_ascend.checkpoint import schemes
from glm5_ascend.quantize.methods.method import Method
from glm5_ascend.quantize.methods.minmax import MINMAX
from glm5_ascend.quantize.methods.rounding import quantize_linear
from glm5_ascend.quantize.methods.ssz import SSZ
from glm5_ascend.quantize.training.fake_quant import fake_quant_activation, fake_quant_linear, fake_quant_weight
from glm5_kernels import ops

N, K = 32, 48
SCHEMES = [schemes.W8A8_DYNAMIC, schemes.W4A8_DYNAMIC]
METHODS = [MINMAX, SSZ]


def adversaries() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(N, K, generator=generator)
    ties = torch.randint(-15, 16, (N, K), generator=generator) / 2.0
    ties[:, 0] = 7.0  # scale 1: every half is a tie
    ties_int8 = torch.randint(-255, 255, (N, K), generator=generator) / 2.0
    ties_int8[:, 0] = 127.0
    zero_rows = normal * (torch.arange(N) % 2)[:, None]
    mixed = normal * 10.0 ** torch.randint(-44, 37, (N, 1), generator=generator)
    return {
        "normal": normal, "ties": ties, "ties_int8": ties_int8, "zero_rows": zero_rows, "zeros": torch.zeros(N, K),
        "negative_zeros": -torch.zeros(N, K), "denormals": normal * 1e-40, "smallest": torch.full((N, K), 1.4e-45),
        "huge": normal * 1e36, "largest": torch.full((N, K), torch.finfo(torch.bfloat16).max), "mixed": mixed,
        "one_outlier": normal.index_fill(1, torch.tensor([5]), 500.0), "negative_peak": -normal.abs(),
        "transposed": torch.randn(K, N, generator=generator).T, "every_other": torch.randn(N, 2 * K)[:, ::2],
        "odd_width": normal[:, :33],
    }  # fmt: skip


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def check(weight: torch.Tensor, scheme: str, method: Method) -> None:
    stored = quantize_linear("model.layers.1.mlp.experts.0.up_proj", weight.float(), scheme, method).stored
    fake = fake_quant_weight(weight, scheme, method)
    assert fake.dequantized.isfinite().all()
    assert same_bits(fake.dequantized, schemes.dequantize(scheme, stored))
    assert same_bits(fake.integers, schemes.integer_weight(scheme, stored))
    assert same_bits(fake.scale, stored["weight_scale"])
    if scheme == schemes.W8A8_DYNAMIC:
        assert same_bits(fake.scale, fake.scale.bfloat16().float())


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_adversarial_weights_have_the_bits_of_the_checkpoint(scheme: str, method: Method) -> None:
    for weight in adversaries().values():
        for dtype in (torch.float32, torch.bfloat16):
            check(weight.to(dtype), scheme, method)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_have_the_bits_of_the_server(dtype: torch.dtype) -> None:
    """An identity in int8 shows how the server rounds x: y = (x_q * 1) * s_x * 1."""
    for values in adversaries().values():
        x = values.to(dtype)
        identity = ops.LinearWeights(torch.eye(x.shape[1], dtype=torch.int8), ops.PER_TOKEN, torch.ones(x.shape[1]))
        assert torch.equal(fake_quant_activation(x), ops.int8_linear(x.float(), identity))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_is_the_server_s(scheme: str, dtype: torch.dtype) -> None:
    weight, x = torch.randn(N, K), torch.randn(2, 9, K).to(dtype)
    stored = quantize_linear("x.up_proj", weight, scheme).stored
    integers, scale = schemes.integer_weight(scheme, stored), stored["weight_scale"].flatten()
    fake = fake_quant_weight(weight, scheme)
    assert same_bits(fake_quant_linear(x, fake), ops.int8_linear(x, ops.LinearWeights(integers, ops.PER_TOKEN, scale)))
    product = fake_quant_activation(x) @ fake.dequantized.T
    torch.testing.assert_close(fake_quant_linear(x, fake).float(), product, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_gradients_go_straight_through(scheme: str) -> None:
    weight, x = torch.randn(N, K, requires_grad=True), torch.randn(5, K, requires_grad=True)
    fake = fake_quant_weight(weight, scheme)
    seen = torch.randn(5, N)
    (fake_quant_linear(x, fake) * seen).sum().backward()
    torch.testing.assert_close(weight.grad, seen.T @ fake_quant_activation(x.detach()))
    torch.testing.assert_close(x.grad, seen @ fake.dequantized.detach())


def test_no_gradient_where_rounding_clips() -> None:
    """SSZ clips the outliers of a row of INT4."""
    weight = (torch.randn(N, K) ** 5).requires_grad_()
    fake = fake_quant_weight(weight, schemes.W4A8_DYNAMIC, SSZ)
    grad = torch.randn(N, K)
    fake.dequantized.backward(grad)
    whole = (weight.detach() / fake.scale).round()
    clipped = (whole < -8) | (whole > 7)
    assert 0 < clipped.sum() < clipped.numel()
    assert torch.equal(weight.grad, torch.where(clipped, 0.0, grad))


def test_another_scheme_is_refused() -> None:
    with pytest.raises(ValueError, match="not W8A8"):
        fake_quant_weight(torch.randn(N, K), schemes.W8A8)
