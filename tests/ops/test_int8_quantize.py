"""Compiled quantizing and scaling give the plain version's bits."""

from __future__ import annotations

import pytest
import torch

from glm5_kernels import int8
from glm5_kernels.compiled import int8_quantize

ROWS = [1, 3, 300]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("columns", [16, 96, 6144, 50])  # 50: no whole lanes, left to the plain version
def test_quantize_per_token(dtype: torch.dtype, rows: int, columns: int) -> None:
    x = (torch.randn(rows, columns) * torch.logspace(-6, 6, rows)[:, None]).to(dtype)
    x[0] = 0
    got, want = int8_quantize.quantize_per_token(x), int8.quantize_per_token(x)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_ties_go_to_even_and_strides_are_read() -> None:
    wide = torch.zeros(2, 40)
    wide[:, :6] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5])
    codes, scale = int8_quantize.quantize_per_token(wide[:, :16])
    assert codes[1, :6].tolist() == [127, 0, 2, 2, 0, -2] and scale.tolist() == [[1.0], [1.0]]


def test_a_nan_is_not_hidden() -> None:
    x = torch.randn(3, 32)
    x[1, 20] = float("nan")
    _, scale = int8_quantize.quantize_per_token(x)
    assert scale.isnan().flatten().tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("static", [False, True])
def test_scale_back(dtype: torch.dtype, rows: int, static: bool) -> None:
    y = torch.randint(-(2**31), 2**31 - 1, (rows, 112), dtype=torch.int32)
    x_scale, scale = None if static else torch.rand(rows, 1), torch.rand(112) * 1e-3
    got = torch.empty(rows, 112, dtype=dtype)
    int8_quantize.scale_back_to(got, y, x_scale, scale)
    assert torch.equal(got, int8.scale_back(y, x_scale, scale, dtype))
