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
