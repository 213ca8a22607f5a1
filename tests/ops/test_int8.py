"""int8 linear layers and quantized experts: integers must be exact, so every comparison is with int64 sums."""

from __future__ import annotations

import pytest
import torch

from glm5_kernels import ops

pytestmark = pytest.mark.usefixtures("implementation")


def int8(*shape: int) -> torch.Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def per_token(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, written the naive way."""
    scale = torch.stack([row.abs().max().clamp_min(1e-8) / 127 for row in x.float()])[:, None]
    return (x.float() / scale).round().clamp(-128, 127).long(), scale


def dynamic(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    x_q, x_scale = per_token(x)
    return (x_q @ weight.long().T).float() * x_scale * scale


@pytest.mark.parametrize("tokens", [1, 3, 17])
@pytest.mark.parametrize("k", [33, 192, 6144])
def test_w8a8_dynamic_is_exact(tokens: int, k: int) -> None:
    x, weight, scale = torch.randn(tokens, k), int8(40, k), torch.rand(40) * 0.01
    got = ops.int8_linear(x, ops.LinearWeights(weight, ops.PER_TOKEN, scale))
    assert torch.equal(got, dynamic(x, weight, scale))


@pytest.mark.parametrize("tokens", [1, 17])
def test_w8a8_static_is_exact(tokens: int) -> None:
    x, weight, w_scale = torch.randn(tokens, 192), int8(40, 192), torch.rand(40) * 0.01
    input_scale, input_offset = torch.tensor([0.03125]), torch.tensor([-7.0])
    bias = -(weight.long().sum(1) * -7).to(torch.int32)
    deq = input_scale * w_scale
    got = ops.int8_linear(x, ops.LinearWeights(weight, ops.PER_TENSOR, deq, input_scale, input_offset, bias))
    x_q = (x / 0.03125 - 7).round().clamp(-128, 127).long()
    assert torch.equal(got, (x_q @ weight.long().T + bias).float() * deq)
    # and the zero point cancels: close to the float layer it approximates (|x| < 3.8 is inside the int8 range)
    inside = x.clamp(-3.75, 4.15)
    dequantized = weight.float() * w_scale[:, None]
    half_steps = 0.5 * 0.03125 * dequantized.abs().sum(1).max()
    assert float((got - inside @ dequantized.T).abs().max()) <= float(half_steps)


def test_row_of_zeros_and_empty_batch() -> None:
    layer = ops.LinearWeights(int8(8, 16), ops.PER_TOKEN, torch.ones(8))
    assert torch.equal(ops.int8_linear(torch.zeros(2, 16), layer), torch.zeros(2, 8))
    assert ops.int8_linear(torch.zeros(0, 16), layer).shape == (0, 8)
    nothing = ops.LinearWeights(int8(0, 64), ops.PER_TOKEN, torch.ones(0))
    assert ops.int8_linear(torch.zeros(3, 64), nothing).shape == (3, 0)


def test_leading_dimensions_and_dtype_are_kept() -> None:
    layer = ops.LinearWeights(int8(8, 16), ops.PER_TOKEN, torch.ones(8))
    y = ops.int8_linear(torch.randn(2, 3, 16).bfloat16(), layer)
    assert y.shape == (2, 3, 8) and y.dtype == torch.bfloat16


class Experts:
    """Random int4 codes and scales of E experts."""

    def __init__(self, experts: int = 5, hidden: int = 32, width: int = 16) -> None:
        self.w13 = torch.randint(-8, 8, (experts, 2 * width, hidden), dtype=torch.int8)
        self.w2 = torch.randint(-8, 8, (experts, hidden, width), dtype=torch.int8)
        self.s13, self.s2 = torch.rand(experts, 2 * width) * 0.05, torch.rand(experts, hidden) * 0.05

    def run(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return ops.w4a8_moe(x, weights, ids, self.w13, self.s13, self.w2, self.s2)

    def one_token_at_a_time(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(x.shape)
        for t in range(x.shape[0]):
            for weight, e in sorted(zip(weights[t].tolist(), ids[t].tolist(), strict=True), key=lambda pair: pair[1]):
                if e >= 0:
                    gate, up = dynamic(x[t : t + 1], self.w13[e], self.s13[e]).chunk(2, -1)
                    hidden = torch.nn.functional.silu(gate) * up
                    out[t] += dynamic(hidden, self.w2[e], self.s2[e])[0] * weight
        return out


def test_experts_are_exact() -> None:
    experts = Experts()
    x, weights = torch.randn(50, 32), torch.rand(50, 2)
    ids = torch.stack([torch.randperm(4)[:2] for _ in range(50)])  # expert 4 gets no token
    torch.testing.assert_close(
        experts.run(x, weights, ids), experts.one_token_at_a_time(x, weights, ids), atol=1e-6, rtol=1e-6
    )


def test_experts_of_another_rank_are_left_out() -> None:
    experts = Experts()
    x, weights, ids = torch.randn(3, 32), torch.rand(3, 2), torch.tensor([[-1, 1], [2, -1], [-1, -1]])
    got = experts.run(x, weights, ids)
    torch.testing.assert_close(got, experts.one_token_at_a_time(x, weights, ids), atol=1e-6, rtol=1e-6)
    assert torch.equal(got[2], torch.zeros(32))


def test_no_tokens() -> None:
    experts = Experts()
    assert experts.run(torch.zeros(0, 32), torch.zeros(0, 2), torch.zeros(0, 2, dtype=torch.long)).shape == (0, 32)
