"""int8 products of many tokens in tiles of AMX give the bits of the plain versions; elsewhere by vectors."""

from __future__ import annotations

import pytest
import torch

from glm5_kernels import int8
from glm5_kernels.compiled import int8_amx, int8_linear, w4a8_moe
from glm5_kernels.compiled.int8_product import MAX_TOKENS
from glm5_kernels.w4a8_moe import ExpertWeights, W4a8Moe, reference

pytestmark = pytest.mark.usefixtures("threads")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "n", "k"), [(17, 32, 64), (32, 96, 512), (257, 160, 1088), (530, 64, 128), (1, 32, 64), (40, 32, 777)]
)
@pytest.mark.parametrize(("static", "packed"), [(False, False), (True, False), (False, True)])
def test_scaled_products(static: bool, packed: bool, tokens: int, n: int, k: int, dtype: torch.dtype) -> None:
    """Sizes that fill blocks of tokens and parts of columns, and that leave a rest; rows of a weight lie apart."""
    lines = n // 2 if packed else n
    codes, weight = (torch.randint(-128, 128, size, dtype=torch.int8) for size in ((tokens, k), (lines, k + 64)))
    scale, factors = torch.rand(n) * 0.01, None if static else torch.rand(tokens, 1)
    bias = torch.randint(-1000, 1000, (n,), dtype=torch.int32) if static else None
    stored = weight.view(torch.uint8) if packed else weight
    got = int8_amx.multiply(codes, factors, stored[:, :k], scale, dtype, bias)
    integers = int8.unpack_int4(weight) if packed else weight
    sums = int8.int8_matmul(codes, integers[:, :k].contiguous()) + (0 if bias is None else bias)
    assert got.dtype is dtype and torch.equal(got, int8.scale_back(sums, factors, scale, dtype))


def test_what_it_takes() -> None:
    weight = torch.zeros(64, 128, dtype=torch.int8)
    assert int8_amx.takes(weight, torch.bfloat16, available=True)
    assert not int8_amx.takes(weight, torch.bfloat16, available=False)
    assert not int8_amx.takes(weight, torch.float16, available=True)
    assert int8_amx.takes(weight[:32, :96], torch.bfloat16, available=True)  # the rows behind it may be read
    packed = weight.view(torch.uint8)
    assert int8_amx.takes(packed[:16], torch.bfloat16, available=True)  # 32 rows
    for other in (weight[:48], packed[:24], weight[:, 96:], weight.t()):
        assert not int8_amx.takes(other, torch.bfloat16, available=True)


def test_layers_and_experts_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tokens go there if the weight fits, few do not."""
    seen: list[int] = []
    multiply, takes = int8_amx.multiply, int8_amx.takes
    monkeypatch.setattr(int8_amx, "takes", lambda weight, dtype: takes(weight, dtype, available=True))
    monkeypatch.setattr(int8_amx, "multiply", lambda codes, *rest: seen.append(len(codes)) or multiply(codes, *rest))
    weight, scale = torch.randint(-128, 128, (64, 128), dtype=torch.int8), torch.rand(64)
    many, layer = MAX_TOKENS + 5, int8.LinearWeights(weight, int8.PER_TOKEN, scale)
    for tokens in (many, 4):
        x = torch.randn(tokens, 128)
        assert torch.equal(int8_linear.apply_linear(x, layer, x.dtype), int8.apply_linear(x, layer, x.dtype))
    packed = [torch.randint(0, 256, shape, dtype=torch.uint8) for shape in ((32, 128), (32, 128), (64, 64))]
    weights = ExpertWeights(packed[:2]), torch.rand(1, 128), ExpertWeights(packed[2:]), torch.rand(1, 128)
    for tokens in (many, 4):
        routed = torch.randn(tokens, 128), torch.rand(tokens, 1), torch.zeros(tokens, 1, dtype=torch.int64)
        operands = W4a8Moe(*routed, *weights)
        torch.testing.assert_close(w4a8_moe.w4a8_moe(operands), reference.w4a8_moe(operands))
    assert seen == [many] * 4  # the layer; gate, up and down
