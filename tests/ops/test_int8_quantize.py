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
    """A row of zeros, one of exact halves, one with a NaN; the rows lie apart."""
    x = (torch.randn(rows, columns + 24) * torch.logspace(-6, 6, rows)[:, None]).to(dtype)[:, :columns]
    x[0], x[1:2], x[2:3, 7] = 0, (torch.randint(-126, 126, (columns,)) + 0.5), float("nan")
    x[1:2, 3] = 127
    got, want = int8_quantize.quantize_per_token(x), int8.quantize_per_token(x)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("static", [False, True])
def test_scale_back(dtype: torch.dtype, rows: int, static: bool) -> None:
    y = torch.randint(-(2**31), 2**31 - 1, (rows, 112), dtype=torch.int32)
    x_scale, scale = None if static else torch.rand(rows, 1), torch.rand(112) * 1e-3
    got = torch.empty(rows, 112, dtype=dtype)
    int8_quantize.scale_back_to(got, y, x_scale, scale)
    assert torch.equal(got, int8.scale_back(y, x_scale, scale, dtype))
