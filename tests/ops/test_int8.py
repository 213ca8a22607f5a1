"""int8 linear layers and quantized experts: integers must be exact, so every comparison is with int64 sums."""

from __future__ import annotations

import math

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("leading", "rows"), [((2, 3), 8), ((0,), 8), ((3,), 0)])
def test_leading_dimensions_and_dtype_are_kept(leading: tuple[int, ...], rows: int, dtype: torch.dtype) -> None:
    """Also of rows of zeros, of no tokens and of no weights."""
    y = ops.int8_linear(
        torch.zeros(*leading, 64).to(dtype), ops.LinearWeights(int8(rows, 64), ops.PER_TOKEN, torch.ones(rows))
    )
    assert y.shape == (*leading, rows) and y.dtype == dtype and not y.any()


def unpacked(block: torch.Tensor) -> torch.Tensor:
    """INT4 codes, the naive way: an even row is the low half of a byte, the next one the high half, both signed."""
    rows = [(block.long() >> shift & 15).add(8).remainder(16).sub(8) for shift in (0, 4)]
    return torch.stack(rows, 1).flatten(0, 1)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("sizes", [(128, 64), (32, 16)])
@pytest.mark.parametrize(("tokens", "limit"), [(0, 0.5), (3, math.inf), (50, math.inf), (50, 0.5)])
def test_experts_are_exact(tokens: int, limit: float, sizes: tuple[int, int], packed: bool) -> None:
    """Five experts, one of which gets no token; -1 is an expert of another rank. Gates are limited from above only."""
    hidden, width = sizes
    shapes, limits, dtype = ((10, width, hidden), (5, hidden, width)), (-128, 128), torch.int8
    if packed:
        shapes, limits, dtype = ((10, width // 2, hidden), (5, hidden // 2, width)), (0, 256), torch.uint8
    w13, w2 = (torch.randint(*limits, shape, dtype=dtype).unbind() for shape in shapes)
    s13, s2 = torch.rand(5, 2 * width) * 0.05, torch.rand(5, hidden) * 0.05
    x, weights = torch.randn(tokens, hidden), torch.rand(tokens, 2)
    ids = torch.randint(-1, 4, (tokens, 2))
    ids[1:2] = -1
    want = torch.zeros(tokens, hidden)
    codes = [[unpacked(block) if packed else block for block in blocks] for blocks in (w13, w2)]
    for t in range(tokens):
        for weight, e in zip(weights[t].tolist(), ids[t].tolist(), strict=True):
            if e >= 0:
                rows = torch.cat(codes[0][2 * e : 2 * e + 2])
                gate, up = dynamic(x[t : t + 1], rows, s13[e]).chunk(2, -1)
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
                want[t] += dynamic(torch.nn.functional.silu(gate) * up, codes[1][e], s2[e])[0] * weight
    got = ops.w4a8_moe(x, weights, ids, ops.ExpertWeights(w13), s13, ops.ExpertWeights(w2), s2, limit)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("tokens", [1, 3, 50])
def test_experts_of_a_slice_of_columns(tokens: int) -> None:
    """A rank of tensor parallel reads its columns of down_proj where they lie: rows with gaps between them."""
    w13, w2 = (torch.randint(0, 256, shape, dtype=torch.uint8) for shape in ((10, 64, 128), (5, 64, 256)))
    x, weights, ids = torch.randn(tokens, 128), torch.rand(tokens, 2), torch.randint(0, 5, (tokens, 2))
    s13, s2 = torch.rand(5, 256), torch.rand(5, 128)
    part, copied = (ops.ExpertWeights(blocks) for blocks in (w2[..., 128:], w2[..., 128:].contiguous()))
    got, want = (ops.w4a8_moe(x, weights, ids, ops.ExpertWeights(w13), s13, down, s2) for down in (part, copied))
    assert torch.equal(got, want)
