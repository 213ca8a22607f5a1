"""The int8 product for a few rows is exact, whatever the shapes and strides."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numba import njit

from glm5_kernels.compiled import int8_dots
from glm5_kernels.compiled.int4_dots_intrinsics import HAS_INT4, beyond_int4, dots_of_int4


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


@pytest.mark.parametrize("tokens", [1, 3, 17, 256])
@pytest.mark.parametrize(("n", "k"), [(1, 64), (7, 128), (300, 6144), (9, 4224)])
@pytest.mark.parametrize("largest", [(-128, 128), (127, 128), (-128, -127)])
def test_codes_of_4_bits_are_exact(tokens: int, n: int, k: int, largest: tuple[int, int]) -> None:
    """Sums in int16 hold these alone; -128 times 15 in every one of them is the largest there can be."""
    a = torch.randint(*largest, (tokens, k), dtype=torch.int8)
    for w in (torch.randint(-8, 8, (n, k)), torch.full((n, k), 7), torch.full((n, k), -8)):
        assert torch.equal(int8_dots.matmul(a, w.to(torch.int8)).double(), a.double() @ w.double().T)


@pytest.mark.parametrize("tokens", [1, 4, 40])
@pytest.mark.parametrize("code", [8, -9])
@pytest.mark.parametrize("place", [(0, 0), (0, 63), (0, 64), (2, 4000), (255, 6143), (256, 5), (297, 100), (299, 6143)])
def test_one_code_of_more_bits(tokens: int, code: int, place: tuple[int, int]) -> None:
    """Wherever it is: first, in the first row and behind where one looks, in the last rows of a task and of all."""
    a, w = torch.full((tokens, 6144), 127, dtype=torch.int8), torch.full((300, 6144), 7, dtype=torch.int8)
    w[place] = code
    assert torch.equal(int8_dots.matmul(a, w).double(), a.double() @ w.double().T)


@pytest.mark.skipif(not HAS_INT4, reason="this processor multiplies bytes by an instruction of its own")
def test_codes_of_4_bits_are_recognized() -> None:
    """By the look at a row's start, and by the product itself: one of either answers would be slow, or wrong."""
    look = njit(lambda address: beyond_int4(address))
    multiply = njit(lambda x, table, out, sums: dots_of_int4(x, 256, table, 4, out, 4, x, 0, sums))
    x, out, sums = np.ones((4, 256), np.int8), np.empty((4, 4), np.int32), np.full(4, 256, np.int32)
    for code in range(-128, 128):
        w, beyond = np.zeros((4, 256), np.int8), not -8 <= code <= 7
        w[3, 63] = w[2, 200] = code
        table = np.array([row.ctypes.data for row in w])
        assert look(w[3].ctypes.data) == beyond and look(w[0].ctypes.data) == 0
        assert multiply(x.ctypes.data, table.ctypes.data, out.ctypes.data, sums.ctypes.data) == beyond
        assert beyond or (out == w.sum(1)).all()
