"""Linear layers and experts in C++ on every instruction set: the plain version's bits at any size, with any threads."""

from __future__ import annotations

import pytest
import torch

from glm5_kernels import int8
from glm5_kernels import w4a8_moe as reference
from glm5_kernels.native.products import apply_linear, w4a8_moe
from glm5_kernels.w4a8_moe import ExpertWeights, W4a8Moe

pytestmark = pytest.mark.usefixtures("instruction_set")
MODES = [int8.PER_TOKEN, int8.PER_TENSOR]


def layer(mode: str, n: int, k: int) -> int8.LinearWeights:
    """Rows lie apart."""
    weight, scale = torch.randint(-128, 128, (n, k + 3), dtype=torch.int8)[:, :k], torch.rand(n) * 0.01
    if mode == int8.PER_TOKEN:
        return int8.LinearWeights(weight, mode, scale)
    bias = torch.randint(-1000, 1000, (n,), dtype=torch.int32)
    return int8.LinearWeights(weight, mode, scale, torch.tensor([0.02]), torch.tensor([3.0]), bias)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (5, 0), (0, 64), (7, 33), (144, 64), (608, 192), (33, 2100)])
def test_linear_layer(mode: str, dtype: torch.dtype, n: int, k: int) -> None:
    """Parts of a vector, of a tile and of a task's rows; tokens for vectors and for tiles, of more than one block."""
    w = layer(mode, n, k)
    for tokens in (0, 1, 2, 3, 8, 9, 33, 300):
        x = (torch.randn(tokens, 2 * k) * 3).to(dtype)
        x[-1:, ::7] *= 1e4  # static activations saturate
        for columns in (x[:, :k], x[:, k:]):
            expected = int8.apply_linear(columns, w, dtype)
            assert torch.equal(apply_linear(columns, w, dtype).nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize(("left", "right"), [(-128, -128), (127, -128), (-128, 127)])
@pytest.mark.parametrize("tokens", [1, 3, 20])
def test_extreme_values_do_not_overflow(tokens: int, left: int, right: int) -> None:
    one = torch.ones(5)
    w = torch.full((5, 16384), right, dtype=torch.int8)
    static = int8.LinearWeights(w, int8.PER_TENSOR, one, one[:1], 0 * one[:1], torch.zeros(5, dtype=torch.int32))
    product = apply_linear(torch.full((tokens, 16384), float(left)), static, torch.float32)
    assert (product == left * right * 16384).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [16, 96, 50])
def test_rows_are_quantized_as_the_plain_version_does(dtype: torch.dtype, columns: int) -> None:
    """A row of zeros, one of exact halves, one with a NaN, one with an infinity: an identity shows the codes."""
    x = (torch.randn(300, columns + 24) * torch.logspace(-6, 6, 300)[:, None]).to(dtype)[:, :columns]
    x[0], x[1], x[2, 7], x[3, 9] = 0, torch.randint(-126, 126, (columns,)) + 0.5, float("nan"), float("inf")
    x[1, 3] = 127
    w = int8.LinearWeights(torch.eye(columns, dtype=torch.int8), int8.PER_TOKEN, torch.ones(columns))
    for rows in (x, x[:5]):
        got, want = apply_linear(rows, w, torch.float32), int8.apply_linear(rows, w, torch.float32)
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 9, 64])
def test_every_code_in_every_place(tokens: int) -> None:
    """All bytes in each column of a packed down projection [512, 64], whose columns the tokens pick one by one."""
    hidden, width = 512, 64
    w2 = ExpertWeights([torch.arange(256, dtype=torch.uint8)[:, None] + torch.arange(width, dtype=torch.uint8)])
    for first in range(0, width, tokens):
        picked = torch.arange(first, first + tokens) % width
        gate_up = torch.zeros(2, width, hidden, dtype=torch.int8)
        gate_up[0, picked, torch.arange(tokens)], gate_up[1] = 127, 1
        operands = W4a8Moe(
            torch.eye(tokens, hidden), torch.ones(tokens, 1), torch.zeros(tokens, 1, dtype=torch.int64),
            ExpertWeights(gate_up.unbind()), torch.ones(1, 2 * width), w2, torch.ones(1, hidden),
        )  # fmt: skip
        got = w4a8_moe(operands)
        torch.testing.assert_close(got, reference.w4a8_moe(operands), rtol=1e-6, atol=0)
        codes = w2.codes(0)[:, picked].T.float()
        torch.testing.assert_close(got, codes * (got.abs().amax(1) / 8)[:, None])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("hidden", "width"), [(64, 64), (130, 38), (200, 320)])
@pytest.mark.parametrize("tokens", [0, 1, 3, 40, 300])
def test_experts(tokens: int, hidden: int, width: int, packed: bool) -> None:
    """Experts without tokens, with one, with enough for tiles, and with more than share the weights that were read."""
    shapes, per = ((12, width, hidden), (6, hidden, width)), 2 if packed else 1
    bytes_of = [
        torch.randint(-128, 128, (count, rows // per + 3, columns + 5), dtype=torch.int8)[:, : rows // per, :columns]
        for count, rows, columns in shapes
    ]
    w13, w2 = (ExpertWeights((blocks.view(torch.uint8) if packed else blocks).unbind()) for blocks in bytes_of)
    ids = torch.randint(-1, 6, (tokens, 3)).clamp(max=4)
    ids[:, 0] = 4
    scales = torch.rand(6, 2 * width) * 1e-3, torch.rand(6, hidden) * 1e-3
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x, weights = torch.randn(tokens, hidden).to(dtype), torch.rand(tokens, 3)
        operands = W4a8Moe(x, weights, ids, w13, scales[0], w2, scales[1])
        torch.testing.assert_close(w4a8_moe(operands), reference.w4a8_moe(operands), rtol=2e-6, atol=1e-6)
        none = operands._replace(topk_ids=ids[:, :0], topk_weights=weights[:, :0])
        assert not w4a8_moe(none).any()
