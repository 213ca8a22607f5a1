"""The Hadamard transform: orthogonal, in place, the same from every implementation."""

from __future__ import annotations

import pytest
import torch

from glm5_kernels import ops
from glm5_kernels.hadamard import hadamard_matrix
from tests.ops.support.implementations import cpu, reference

SIZES = [1, 2, 4, 12, 24, 48, 96, 192, 384, 768, 1536, 20, 40, 64, 128, 512, 2048, 28, 36, 52, 576]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.usefixtures("implementation")
def test_it_is_orthogonal_with_equal_entries(size: int) -> None:
    matrix = ops.hadamard(torch.eye(size), torch.ones(size))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size), atol=5e-6, rtol=0)
    torch.testing.assert_close(matrix.abs(), torch.full((size, size), size**-0.5))


@pytest.mark.parametrize("size", [*SIZES, 6144])
@pytest.mark.parametrize(("dim", "across"), [(0, 48), (1, 48), (0, 17), (0, 33)])
def test_both_agree_along_both_dimensions(size: int, dim: int, across: int) -> None:
    """Three runs of the size; a weight with signs and magnitudes; widths that lanes do not divide."""
    x = torch.randn(3 * size, across) if dim == 0 else torch.randn(across, 3 * size)
    weight = torch.randn(size)
    got, want = x.clone(), x.clone()
    assert cpu.hadamard(got, weight, dim) is got
    torch.testing.assert_close(got, reference.hadamard(want, weight, dim), atol=3e-5, rtol=1e-5)


@pytest.mark.usefixtures("implementation")
def test_a_part_of_a_matrix_leaves_the_rest_alone() -> None:
    """Bytes next to a transformed slice, between its rows or behind them, keeps its bytes."""
    whole = torch.randn(40, 100)
    before = whole.clone()
    ops.hadamard(whole[3:35, 20:84], torch.ones(64), 1)
    assert not torch.equal(whole[3:35, 20:84], before[3:35, 20:84])
    ops.hadamard(whole[3:35, 20:84], torch.ones(64), 1)  # H / sqrt(n) is its own inverse
    torch.testing.assert_close(whole, before, atol=1e-5, rtol=1e-5)
    ops.hadamard(whole[3:35, 20:84], torch.ones(32), 0)
    keep = torch.ones_like(whole, dtype=torch.bool)
    keep[3:35, 20:84] = False
    assert torch.equal(whole[keep], before[keep])


def test_the_number_of_rows_changes_no_bit() -> None:
    x, weight = torch.randn(33, 384), torch.randn(384)
    whole = cpu.hadamard(x.clone(), weight)
    assert torch.equal(whole, torch.cat([cpu.hadamard(row.clone()[None], weight) for row in x]))


@pytest.mark.parametrize("order", [*range(4, 65, 4), 100, 576, 7168])
def test_there_is_a_core_for_every_order(order: int) -> None:
    core = hadamard_matrix(order)
    assert torch.equal(core.abs(), torch.ones(order, order))
    assert torch.equal(core @ core.T, order * torch.eye(order))
