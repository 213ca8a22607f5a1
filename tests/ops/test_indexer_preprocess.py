"""Indexer preprocess against fp64: padding, strided operands, one and two threads."""

from __future__ import annotations

import pytest
import torch

from glm5_kernels import ops


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


@pytest.mark.usefixtures("implementation", "threads")
@pytest.mark.parametrize("tokens", [0, 7, 130])
@pytest.mark.parametrize(("dim", "pairs"), [(128, 32), (20, 5), (64, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("interleaved", [True, False])
def test_against_fp64(tokens: int, dim: int, pairs: int, dtype: torch.dtype, interleaved: bool) -> None:
    torch.manual_seed(tokens)
    projected = torch.randn(tokens, dim + 3).to(dtype)  # keys and weights of one product: rows that lie apart
    q, k = torch.randn(tokens, 3, dim).to(dtype), projected[:, :dim]
    weight, bias, angles = torch.rand(dim), torch.randn(dim), torch.rand(tokens, pairs).double() * 6
    slots, cache = torch.randperm(160)[:tokens], torch.full((20, 8, dim), 7.0, dtype=dtype)
    slots[:2] = -1
    want_q, want_k = in_fp64(q, k, weight, bias, angles, interleaved)
    cos, sin = angles.cos().float(), angles.sin().float()
    got = ops.indexer_preprocess(q, k, weight, bias, 1e-6, cos, sin, interleaved, slots, cache)
    rounding = torch.finfo(dtype).eps  # one at the end
    torch.testing.assert_close(got.double(), want_q, rtol=rounding, atol=2e-6)
    rows, written = cache.view(160, dim), torch.zeros(160, dtype=torch.bool)
    untouched = slots >= 0
    torch.testing.assert_close(rows[slots[untouched]].double(), want_k[untouched], rtol=rounding, atol=5e-6)
    written[slots[untouched]] = True
    assert bool((rows[~written] == 7).all())
