"""Batches of one length in the ops' layouts: views, and the same answers as one request at a time."""

from __future__ import annotations

import pytest
import torch

from glm5_kernels import ops

pytestmark = pytest.mark.usefixtures("implementation")


def test_a_batch_of_one_length_is_a_view_and_gives_what_each_request_gives() -> None:
    batch, new, length = 3, 2, 32
    q, keys, w = torch.randn(batch, new, 4, 16), torch.randn(batch, length, 16), torch.randn(batch, new, 4)
    rows, starts = ops.queries_in_a_row(q)
    cache, table = ops.keys_in_pages(keys, 16)
    assert rows.data_ptr() == q.data_ptr() and cache.data_ptr() == keys.data_ptr()
    lengths = torch.full((batch,), length)
    got = ops.lightning_indexer(rows, cache, w.flatten(0, 1), ops.PagedBatch(starts, lengths, table), 5).view(
        batch, new, 5
    )
    for b in range(batch):
        scores = torch.einsum("qhs,qh->qs", torch.relu(torch.einsum("qhd,sd->qhs", q[b], keys[b])), w[b])
        for i in range(new):
            seen = length - new + i + 1
            assert got[b, i].tolist() == sorted(scores[i, :seen].argsort(descending=True, stable=True)[:5].tolist())


def test_keys_that_fill_no_whole_blocks_are_refused() -> None:
    with pytest.raises(ops.KernelInputError, match="33 keys per request do not fill blocks of 16"):
        ops.keys_in_pages(torch.randn(1, 33, 4), 16)


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
