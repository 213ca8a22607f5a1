"""The value up-projection, and the products of each head that it is made of, against sums in fp64."""

from __future__ import annotations

import pytest
import torch

from glm5_kernels import ops
from glm5_kernels.native import floats


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("tokens", [0, 1, 3, 16, 17, 130])
@pytest.mark.parametrize(("rank", "size"), [(512, 256), (96, 32), (20, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_against_fp64(tokens: int, rank: int, size: int, dtype: torch.dtype) -> None:
    latent, w_uv = torch.randn(tokens, 3, rank).to(dtype), (torch.randn(3, rank, size) * 0.1).to(dtype)
    want = torch.einsum("thr,hrv->thv", latent.double(), w_uv.double()).flatten(1)
    rounding = torch.finfo(dtype).eps  # once at the end; and up to 512 additions in fp32
    strided = torch.stack([latent, latent], -1)[..., 0], w_uv.transpose(0, 1).contiguous().transpose(0, 1)
    for operands in ((latent, w_uv), strided):
        got = ops.v_up_proj(*operands)
        assert got.dtype == dtype and got.shape == (tokens, 3 * size) and got.is_contiguous()
        torch.testing.assert_close(got.double(), want, rtol=2 * rounding, atol=8 * rounding + 2e-5)


@pytest.mark.usefixtures("threads")
def test_a_token_is_computed_by_itself() -> None:
    """Bits are equal in any company of a decode step, and with any number of threads (as `threads` shows)."""
    x, w = torch.randn(16, 4, 64).bfloat16(), torch.randn(4, 64, 96).bfloat16()
    whole = floats.per_head(x, w)
    for count in (2, 7):
        assert torch.equal(floats.per_head(x[:count], w), whole[:count])


def test_no_number_stays_one() -> None:
    x = torch.randn(3, 2, 32).bfloat16()
    x[1, 0, 5] = float("nan")
    got = floats.per_head(x, torch.randn(2, 32, 64).bfloat16())
    assert got.isnan().sum() == 64 and got[1, 0].isnan().all()
