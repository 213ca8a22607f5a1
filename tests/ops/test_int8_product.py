"""Compiled int8 products: exact sums, and the bits of the plain versions when they are scaled back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from glm5_kernels import int8
from glm5_kernels.compiled import int8_product
from glm5_kernels.compiled.int8_backends import INT4_ZERO, Matrix
from glm5_kernels.compiled.int8_grouped import Groups, grouped_product, of_experts, quantized, takes_weight
from glm5_kernels.compiled.int8_linear import apply_linear
from glm5_kernels.compiled.int8_product import rows_of
from glm5_kernels.compiled.task_rows import LINES, padded_tokens
from glm5_kernels.w4a8_moe import ExpertWeights

MODES = [int8.PER_TOKEN, int8.PER_TENSOR]


def codes(*shape: int) -> torch.Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def layer(mode: str, n: int, k: int) -> int8.LinearWeights:
    weight, scale = codes(n, k), torch.rand(n) * 0.01
    if mode == int8.PER_TOKEN:
        return int8.LinearWeights(weight, mode, scale)
    bias = torch.randint(-1000, 1000, (n,), dtype=torch.int32)
    return int8.LinearWeights(weight, mode, scale, torch.tensor([0.02]), torch.tensor([3.0]), bias)


@pytest.mark.parametrize("tokens", [0, 1, 3, 8, 16, 17, 257])
@pytest.mark.parametrize(("n", "k"), [(1, 64), (7, 128), (300, 4224), (40, 96)])
def test_sums_are_exact(tokens: int, n: int, k: int) -> None:
    """Parts of a tile and of a task's rows; 1 and 7 rows, 96 columns, and 17 or 257 tokens go to a library."""
    a = codes(tokens, k)
    for w in (codes(n, k), codes(n + 3, 2 * k)[3:, k:]):
        product = int8_product.matmul(a, w)
        assert product.dtype is torch.int32 and torch.equal(product.double(), a.double() @ w.double().T)


@pytest.mark.parametrize(("left", "right"), [(-128, -128), (127, -128), (-128, 127)])
def test_extreme_values_do_not_overflow(left: int, right: int) -> None:
    a, w = torch.full((2, 16384), left, dtype=torch.int8), torch.full((5, 16384), right, dtype=torch.int8)
    assert (int8_product.matmul(a, w) == left * right * 16384).all()


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "n", "k"),
    [
        (1, 16, 64),
        (2, 144, 64),
        (3, 608, 192),
        (6, 64, 128),
        (16, 1024, 128),
        (17, 32, 64),
        (5, 24, 80),
        (4100, 1040, 80),
    ],
)
def test_linear_layer(mode: str, dtype: torch.dtype, tokens: int, n: int, k: int) -> None:
    """More weight rows than a task has; too many tokens for one pass; sizes that lanes do not divide; several parts."""
    w, x = layer(mode, n, k), (torch.randn(tokens, 2 * k) * 3).to(dtype)
    x[-1, ::7] *= 1e9  # static activations saturate
    for columns in (x[:, :k], x[:, k:]):
        assert torch.equal(apply_linear(columns, w, dtype), int8.apply_linear(columns, w, dtype))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("k", [80, 16])
def test_rows_that_end_within_a_step(mode: str, k: int) -> None:
    """One pass only if the storage has whole steps; the bytes behind the last row change nothing."""
    w, x = layer(mode, 48, k), torch.randn(6, k) * 3
    expected = int8.apply_linear(x, w, torch.float32)
    for padding, one_pass in ((0, False), (63 - (k - 1) % 64, True), (64, True)):
        storage = torch.full((48 * k + padding,), 77, dtype=torch.int8)
        storage[: 48 * k] = w.weight.flatten()
        padded = w._replace(weight=storage[: 48 * k].view(48, k))
        assert takes_weight(padded.weight, torch.rand(48)) == one_pass
        assert torch.equal(apply_linear(x, padded, torch.float32), expected)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 21])
def test_every_code_in_every_place(tokens: int) -> None:
    """Packed INT4 times the rows of an identity, which pick columns, and extreme rows; all bytes in each column."""
    columns = 64
    w = torch.arange(256, dtype=torch.uint8)[:, None] + torch.arange(columns, dtype=torch.uint8)  # wraps around
    codes = int8.unpack_int4(w.view(torch.int8))
    for rows in (torch.eye(columns, dtype=torch.int8), torch.full((tokens, columns), -128, dtype=torch.int8)):
        for x in rows.split(tokens):
            padded = int8_product.empty_codes(padded_tokens(len(x)), columns)
            padded[:], padded[: len(x)] = 0, x.numpy()
            out = np.empty((len(padded), len(codes)), np.int32)
            x_rows, weights, sums = rows_of(padded), Matrix(w.data_ptr(), columns), rows_of(out)
            lines, size = len(w) // LINES, (len(x), columns)
            int8_product.multiply_rows(x_rows, size, weights, True, lines, lines * columns, sums)
            out -= INT4_ZERO * padded.sum(1, np.int32)[:, None]
            assert torch.equal(torch.from_numpy(out[: len(x)]), int8.int8_matmul(x, codes))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_groups_of_rows(dtype: torch.dtype) -> None:
    """Five groups of two blocks each: one is empty, one has a single row, one more than a tile; rows for two tasks."""
    x, scale, rows = torch.randn(9, 128), torch.rand(5, 2 * 272), 272 // (2 if dtype is torch.uint8 else 1)
    weights = ExpertWeights(torch.randint(0, 127, (10, rows + 3, 192), dtype=dtype)[:, :rows, :128].unbind())
    pairs, starts = np.array([4, 0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 0]), np.array([0, 1, 1, 10, 11, 12])
    groups = Groups(pairs, starts, np.array([0, 2, 3, 4, -1]))
    product = grouped_product(quantized(x), groups, of_experts(weights, scale), torch.float32)
    for group in range(5):
        tokens = slice(groups.starts[group], groups.starts[group + 1])
        codes = torch.cat([weights.codes(2 * group), weights.codes(2 * group + 1)])
        linear = int8.LinearWeights(codes, int8.PER_TOKEN, scale[group])
        assert torch.equal(product[tokens], int8.apply_linear(x[groups.rows[tokens]], linear, torch.float32))
