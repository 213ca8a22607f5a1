"""Products of a few tokens in one pass give the bits of the plain versions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from glm5_kernels import int8, ops
from glm5_kernels.compiled import int8_product as few_rows

pytestmark = pytest.mark.usefixtures("threads")


def layer(mode: str, n: int, k: int) -> int8.LinearWeights:
    weight, scale = torch.randint(-128, 128, (n, k), dtype=torch.int8), torch.rand(n) * 0.01
    if mode == int8.PER_TOKEN:
        return int8.LinearWeights(weight, mode, scale)
    bias = torch.randint(-1000, 1000, (n,), dtype=torch.int32)
    return int8.LinearWeights(weight, mode, scale, torch.tensor([0.02]), torch.tensor([3.0]), bias)


@pytest.mark.parametrize("mode", [int8.PER_TOKEN, int8.PER_TENSOR])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "n", "k"),
    [(1, 16, 64), (3, 608, 192), (16, 1024, 128), (17, 32, 64), (5, 24, 80), (4100, 1000, 64), (4100, 1040, 80)],
)
def test_a_linear_layer(mode: str, dtype: torch.dtype, tokens: int, n: int, k: int) -> None:
    """Some weight rows more than a task has; too many tokens, and sizes the lanes do not divide, go the other way.

    The last two are so large that they are multiplied in parts, of which the first one's last has odd rows.
    """
    w, x = layer(mode, n, k), (torch.randn(tokens, 2 * k) * 3).to(dtype)
    for given in (x[:, :k], x[:, k:]):
        assert torch.equal(few_rows.apply_linear(given, w, dtype), int8.apply_linear(given, w, dtype))


@pytest.mark.parametrize("mode", [int8.PER_TOKEN, int8.PER_TENSOR])
@pytest.mark.parametrize("k", [80, 96, 16, 144])
def test_rows_that_end_within_a_step(mode: str, k: int) -> None:
    """In one pass only where the bytes behind the last row are the storage's; what they hold changes nothing."""
    w, x = layer(mode, 48, k), torch.randn(6, k) * 3
    want = int8.apply_linear(x, w, torch.float32)
    for room, in_one_pass in ((0, False), (63 - (k - 1) % 64, True), (64, True)):
        storage = torch.full((48 * k + room,), 77, dtype=torch.int8)
        storage[: 48 * k] = w.weight.flatten()
        held = w._replace(weight=storage[: 48 * k].view(48, k))
        assert few_rows.multiplies(held.weight, torch.rand(48)) == in_one_pass
        assert torch.equal(few_rows.apply_linear(x, held, torch.float32), want)


def test_what_saturates() -> None:
    w, x = layer(int8.PER_TENSOR, 16, 64), torch.tensor([1e9, -1e9, 0.0, 2.5]).repeat(2, 16)
    assert torch.equal(few_rows.apply_linear(x, w, torch.float32), int8.apply_linear(x, w, torch.float32))


def test_what_a_layer_lacks_is_named() -> None:
    with pytest.raises(ops.KernelInputError, match="needs scale, input_scale"):
        few_rows.apply_linear(
            torch.zeros(1, 64), layer(int8.PER_TENSOR, 16, 64)._replace(input_scale=None), torch.float32
        )


def test_groups_of_rows() -> None:
    """Of five groups one is empty, one has a single row, one more than a tile."""
    x, scale = torch.randn(9, 128), torch.rand(5, 272)
    weight = torch.randint(-8, 8, (5, 300, 128), dtype=torch.int8)[:, :272]  # with a gap between two groups
    rows, starts = np.array([4, 0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 0]), np.array([0, 1, 1, 10, 11, 12])
    got = few_rows.grouped(x, rows, starts, weight, scale, torch.float32)
    for group in range(5):
        few = slice(starts[group], starts[group + 1])
        linear = int8.LinearWeights(weight[group], int8.PER_TOKEN, scale[group])
        assert torch.equal(got[few], int8.apply_linear(x[rows[few]], linear, torch.float32))
