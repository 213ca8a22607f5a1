"""Linear layers in bf16 summed in fp32, as on CPUs without bf16 products; forced on those that have them."""

from __future__ import annotations

import sys

import pytest
import torch

from glm5_kernels.int8 import LinearWeights
from glm5_kernels.native import floats
from tests.ops.support.implementations import cpu
from tests.support.command import environment, said

#: Products with so many columns that what they copy of the tokens is memory of its own.
LARGE = """
import torch
from glm5_kernels import int8
from glm5_kernels.native.products import apply_linear
for tokens in (1, 2, 5, 16):
    x, weight, scale = torch.randn(tokens, 12288).bfloat16(), torch.randn(80, 12288).bfloat16(), torch.rand(80)
    product, expected = apply_linear(x, int8.LinearWeights(weight), x.dtype), x.double() @ weight.double().T
    torch.testing.assert_close(product.double(), expected, rtol=2**-8, atol=1e-5 * 12288)
    layer = int8.LinearWeights(weight.to(torch.int8), int8.PER_TOKEN, scale)
    assert torch.equal(apply_linear(x, layer, x.dtype), int8.apply_linear(x, layer, x.dtype))
print("equal")
"""


@pytest.fixture(params=["in fp32", "in blocks of a weight", "as on this CPU"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param != "as on this CPU":
        monkeypatch.setattr(floats, "ONEDNN_MULTIPLIES", False)
    if request.param == "in blocks of a weight":
        monkeypatch.setattr(floats, "_ELEMENTS", 16 * 64)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 6, 17, 300])
@pytest.mark.parametrize("shape", [(3, 5), (64, 96), (80, 64), (300, 4096), (0, 8)])
def test_against_fp64(tokens: int, shape: tuple[int, int]) -> None:
    x, weight = torch.randn(tokens, shape[1]).bfloat16(), torch.randn(shape).bfloat16()
    expected, product = x.double() @ weight.double().T, cpu.int8_linear(x, LinearWeights(weight))
    assert product.dtype == torch.bfloat16 and product.shape == expected.shape
    # rounded once, to 8 bits; what cancels is off by the sums' own error
    torch.testing.assert_close(product.double(), expected, rtol=2**-8, atol=1e-5 * shape[1])


def test_copies_of_tokens_are_held() -> None:
    """With this setting Linux takes back what is freed at once: a kernel that still reads it ends the process."""
    assert said(sys.executable, "-c", LARGE, env=environment(MALLOC_MMAP_THRESHOLD_="512")) == "equal\n"
