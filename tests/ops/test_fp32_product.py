"""Products by panels against torch in float64."""

from __future__ import annotations

import pytest
import torch

from glm5_kernels.native import head_products as panels

pytestmark = pytest.mark.usefixtures("threads")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "n", "r"), [(3, 192, 512), (1, 16, 32), (5, 80, 64), (2, 24, 40)])
@pytest.mark.parametrize("tokens", [0, 1, 2, 9, 16, 17, 150])
def test_every_head_by_its_matrix(tokens: int, heads: int, n: int, r: int, dtype: torch.dtype) -> None:
    """A part of wider rows, as the query's unrotated part is; few and many tokens, sizes the lanes do not divide."""
    x, w = torch.randn(tokens, heads, n + 16).to(dtype), torch.randn(heads, n, r).to(dtype)
    got = panels.per_head(x[..., :n], w)
    want = torch.einsum("thn,hnr->thr", x[..., :n].double(), w.double())
    assert got.shape == (tokens, heads, r) and got.dtype is dtype and got.is_contiguous()
    tolerance = 2**-8 if dtype is torch.bfloat16 else n * 2**-22
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance * n**0.5)


def test_a_token_is_computed_by_itself() -> None:
    """Bits are equal in any company of a decode step, and with any number of threads (as `threads` shows)."""
    x, w = torch.randn(16, 4, 64).bfloat16(), torch.randn(4, 64, 96).bfloat16()
    whole = panels.per_head(x, w)
    for count in (2, 7):
        assert torch.equal(panels.per_head(x[:count], w), whole[:count])


def test_no_number_stays_one() -> None:
    x = torch.randn(3, 2, 32).bfloat16()
    x[1, 0, 5] = float("nan")
    got = panels.per_head(x, torch.randn(2, 32, 64).bfloat16())
    assert got.isnan().sum() == 64 and got[1, 0].isnan().all()
