"""int8 products of many tokens in tiles of AMX give the bits of the plain versions; elsewhere by vectors."""

from __future__ import annotations

import pytest
import torch

from glm5_kernels import int8
from glm5_kernels.compiled import int8_amx, int8_linear, w4a8_moe
from glm5_kernels.compiled.int8_product import MAX_TOKENS

pytestmark = pytest.mark.usefixtures("threads")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "n", "k"), [(17, 32, 64), (32, 96, 512), (257, 160, 1088), (530, 64, 128), (1, 32, 64), (40, 32, 777)]
)
@pytest.mark.parametrize("static", [False, True])
def test_scaled_products(static: bool, tokens: int, n: int, k: int, dtype: torch.dtype) -> None:
    """Sizes that fill blocks of tokens and parts of columns, and that leave a rest; rows of a weight lie apart."""
    codes, weight = (torch.randint(-128, 128, size, dtype=torch.int8) for size in ((tokens, k), (n, k + 64)))
    scale, factors = torch.rand(n) * 0.01, None if static else torch.rand(tokens, 1)
    bias = torch.randint(-1000, 1000, (n,), dtype=torch.int32) if static else None
    got = int8_amx.multiply(codes, factors, weight[:, :k], scale, dtype, bias)
    sums = int8.int8_matmul(codes, weight[:, :k].contiguous()) + (0 if bias is None else bias)
    assert got.dtype is dtype and torch.equal(got, int8.scale_back(sums, factors, scale, dtype))


def test_what_it_takes() -> None:
    weight = torch.zeros(64, 128, dtype=torch.int8)
    assert int8_amx.takes(weight, torch.bfloat16, available=True)
    assert not int8_amx.takes(weight, torch.bfloat16, available=False)
    assert not int8_amx.takes(weight, torch.float16, available=True)
    assert int8_amx.takes(weight[:32, :96], torch.bfloat16, available=True)  # the rows behind it may be read
    for other in (weight[:48], weight[:, 96:], weight.t()):
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
        want = int8.apply_linear(x, layer, torch.float32)
        assert torch.equal(int8_linear.apply_linear(x, layer, torch.float32), want)
        assert torch.equal(w4a8_moe._multiply(*int8.quantize_per_token(x), weight, scale), want)
    assert seen == [many, many]
