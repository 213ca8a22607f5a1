"""Indexer preprocess: a worked example, the same in fp64, padding, strided operands."""

from __future__ import annotations

import pytest
import torch

from glm5_kernels import ops
from glm5_kernels.registry import load

IMPLEMENTATIONS = ["reference", "cpu"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("interleaved", "rotated"), [(True, [-2.0, 1.0, 3.0, 4.0]), (False, [-3.0, 2.0, 1.0, 4.0])])
def test_a_worked_example(implementation: str, interleaved: bool, rotated: list[float]) -> None:
    """A quarter turn of the first pair, none of the second; rows of sixteen, as the compiled version takes them."""
    rest = [0.0] * 12
    q, k = torch.tensor([[[1.0, 2.0, 3.0, 4.0, *rest]]]), torch.tensor([[3.0, -1.0] * 8])
    cos, sin, cache = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]]), torch.zeros(1, 2, 16)
    norm = torch.full((16,), 2.0), torch.full((16,), 0.5)  # k has mean 1 and variance 4: normed it is 2.5, -1.5, ...
    out = load("indexer_preprocess", implementation)(q, k, *norm, 0.0, cos, sin, interleaved, torch.tensor([1]), cache)
    assert out[0, 0, :4].tolist() == rotated
    key = [1.5, 2.5] if interleaved else [-2.5, -1.5]
    assert cache[0, 1, :2].tolist() == key and cache[0, 0].tolist() == [0.0] * 16


def in_fp64(
    q: torch.Tensor, k: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, angles: torch.Tensor, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The formula with complex numbers."""
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]  # [T, 1, pairs]

    def rotate(x: torch.Tensor) -> torch.Tensor:
        pairs = angles.shape[1]
        part = x[..., : 2 * pairs].contiguous()
        a, b = (part[..., 0::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
        product = torch.complex(a.contiguous(), b.contiguous()) * turn
        parts = product.real, product.imag
        both = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
        return torch.cat([both, x[..., 2 * pairs :]], -1)

    k = k.double()
    centred = k - k.mean(-1, keepdim=True)
    normed = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double() + bias.double()
    return rotate(q.double()), rotate(normed[:, None])[:, 0]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("tokens", [0, 1, 7, 130])
@pytest.mark.parametrize(("dim", "pairs"), [(128, 32), (20, 5), (64, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("interleaved", [True, False])
def test_against_fp64(
    implementation: str, tokens: int, dim: int, pairs: int, dtype: torch.dtype, interleaved: bool
) -> None:
    torch.manual_seed(tokens)
    projected = torch.randn(tokens, dim + 3).to(dtype)  # keys and weights of one product: rows that lie apart
    q, k = torch.randn(tokens, 3, dim).to(dtype), projected[:, :dim]
    weight, bias, angles = torch.rand(dim), torch.randn(dim), torch.rand(tokens, pairs).double() * 6
    slots, cache = torch.randperm(160)[:tokens], torch.full((20, 8, dim), 7.0, dtype=dtype)
    slots[:2] = -1
    want_q, want_k = in_fp64(q, k, weight, bias, angles, interleaved)
    cos, sin = angles.cos().float(), angles.sin().float()
    got = load("indexer_preprocess", implementation)(q, k, weight, bias, 1e-6, cos, sin, interleaved, slots, cache)
    rounding = torch.finfo(dtype).eps  # one at the end
    torch.testing.assert_close(got.double(), want_q, rtol=rounding, atol=2e-6)
    rows, written = cache.view(160, dim), torch.zeros(160, dtype=torch.bool)
    untouched = slots >= 0
    torch.testing.assert_close(rows[slots[untouched]].double(), want_k[untouched], rtol=rounding, atol=5e-6)
    written[slots[untouched]] = True
    assert bool((rows[~written] == 7).all())


def test_any_number_of_threads() -> None:
    torch.manual_seed(0)
    q, k, angle = torch.randn(300, 4, 32), torch.randn(300, 32), torch.randn(300, 8)
    rows = []
    for threads in (1, 2, 5):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            cache = torch.zeros(5, 64, 32)
            norm = torch.ones(32), torch.zeros(32), 1e-6
            rows.append((ops.indexer_preprocess(q, k, *norm, angle, angle, True, torch.arange(300), cache), cache))
        finally:
            torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in rows[1:] for a, b in zip(rows[0], other, strict=True))
