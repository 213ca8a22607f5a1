"""The RMS norm against fp64, and each rounding of vLLM's."""

from __future__ import annotations

import pytest
import torch

from glm5_kernels import ops


@pytest.mark.usefixtures("implementation", "threads")
@pytest.mark.parametrize("tokens", [0, 1, 3, 130])
@pytest.mark.parametrize("columns", [6144, 512, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_against_fp64(tokens: int, columns: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(tokens, 2 * columns).to(dtype)[:, :columns], (torch.rand(columns) + 0.5).to(dtype)
    residual = torch.randn(tokens, columns).to(dtype)
    rounding = torch.finfo(dtype).eps
    for added in (residual, None):
        out, total = ops.rms_norm(x, added, weight, 1e-5)
        want = x.double() if added is None else x.double() + added.double()
        torch.testing.assert_close(total.double(), want, rtol=rounding, atol=rounding)
        want = want * (want.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
        torch.testing.assert_close(out.double(), want, rtol=2 * rounding, atol=2 * rounding)
        assert out.dtype == total.dtype == dtype and out.shape == total.shape == x.shape


def test_nan_stays() -> None:
    x = torch.randn(2, 64).bfloat16()
    x[0, 5] = float("nan")
    out, _ = ops.rms_norm(x, None, torch.ones(64).bfloat16(), 1e-5)
    assert out[0].isnan().all() and out[1].isfinite().all()
