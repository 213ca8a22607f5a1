"""Operands of the indexer in any strides."""

from __future__ import annotations

import pytest
import torch

from glm5_kernels import ops

pytestmark = pytest.mark.usefixtures("implementation")


@pytest.mark.parametrize("strided", ["q", "k_cache", "weights"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_index_operands_in_any_strides(dtype: torch.dtype, strided: str) -> None:
    """Elements of a row that do not follow each other, as a slice or a transposed tensor has them."""
    tokens, heads, dim, length = 3, 8, 64, 48
    operands = {
        "q": torch.randn(tokens, heads, dim).to(dtype),
        "k_cache": torch.randn(3, 16, dim).to(dtype),
        "weights": torch.randn(tokens, heads),
    }
    batch = ops.PagedBatch(torch.tensor([0, tokens]), torch.tensor([length]), torch.tensor([[2, 0, 1]]))
    want = ops.lightning_indexer(*operands.values(), batch, 5)
    apart = torch.zeros(*operands[strided].shape, 2, dtype=operands[strided].dtype)
    apart[..., 0] = operands[strided]
    got = ops.lightning_indexer(*(operands | {strided: apart[..., 0]}).values(), batch, 5)
    assert torch.equal(got, want)
