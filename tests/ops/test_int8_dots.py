"""The int8 product for a few rows is exact, whatever the shapes and strides."""

from __future__ import annotations

import pytest
import torch

from glm5_kernels.compiled import int8_dots


@pytest.mark.parametrize("tokens", [0, 1, 3, 4, 8, 16, 17, 257])
@pytest.mark.parametrize(("n", "k"), [(1, 64), (7, 128), (300, 6144), (9, 4224), (40, 96)])
def test_exact(tokens: int, n: int, k: int) -> None:
    """-128 included on both sides; 96 columns and 17 (or 257) tokens are a library's case."""
    a, w = (torch.randint(-128, 128, shape, dtype=torch.int8) for shape in ((tokens, k), (n, k)))
    got = int8_dots.matmul(a, w)
    assert got.dtype is torch.int32 and torch.equal(got.long(), a.long() @ w.long().T)


def test_extreme_values_do_not_overflow() -> None:
    """16384 products of -128 * -128, and of 127 * -128: beyond any real row."""
    for left, right in ((-128, -128), (127, -128), (-128, 127)):
        a, w = torch.full((2, 16384), left, dtype=torch.int8), torch.full((5, 16384), right, dtype=torch.int8)
        assert (int8_dots.matmul(a, w) == left * right * 16384).all()


@pytest.mark.parametrize("columns", [6144, 6145, 16384])
@pytest.mark.parametrize("largest", [8, 127])
def test_by_fp32_is_exact(columns: int, largest: int) -> None:
    """One product where the rows are short enough for it, parts where they are not: both at the edge of 2^24."""
    w = torch.randint(-largest, largest + 1, (40, columns), dtype=torch.int8)
    a = torch.cat([w[:20], torch.full((1, columns), -128, dtype=torch.int8), -w[20:]])  # sums as large as can be
    assert torch.equal(int8_dots.by_fp32(a, w).long(), a.long() @ w.long().T)


def test_a_slice_of_a_weight() -> None:
    w = torch.randint(-128, 128, (20, 256), dtype=torch.int8)
    a = torch.randint(-128, 128, (2, 128), dtype=torch.int8)
    assert torch.equal(int8_dots.matmul(a, w[3:9, 64:192]).long(), a.long() @ w[3:9, 64:192].long().T)
