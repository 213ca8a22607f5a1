"""The Lightning Indexer, of floats and of int8, against a brute-force reading of its definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from glm5_kernels import ops
from tests.ops.support.paged_batch import RaggedBatch, paged_batch

pytestmark = pytest.mark.usefixtures("implementation")


def brute_force(batch: RaggedBatch, q: torch.Tensor, keys: list[torch.Tensor], w: torch.Tensor, topk: int) -> Any:
    """Score every visible position in a Python loop, pass over missing blocks, take the first by (-score, position)."""
    out = []
    for t, (b, visible) in enumerate(batch.tokens()):
        scores = {}
        for s in range(visible):
            dots = [max(float(q[t, h].double() @ keys[b][s].double()), 0.0) for h in range(q.shape[1])]
            if batch.block_table[b, s // batch.block_size] >= 0:
                scores[s] = sum(float(w[t, h]) * dot for h, dot in enumerate(dots))
        row = sorted(sorted(scores, key=lambda s: (-scores[s], s))[:topk])
        out.append(row + [-1] * (topk - len(row)))
    return out


@pytest.mark.parametrize("topk", [1, 5, 64])
@pytest.mark.parametrize("int8", [False, True])
def test_matches_brute_force_on_ragged_paged_batches(int8: bool, topk: int) -> None:
    """A whole prefill, prefixes shorter than topk, a padding request that sees nothing, a block that is missing.

    A -1 inside the block table must not read block -1 (Python's last one); int8 has a scale for every key and head.
    """
    lengths = [17, 1, 9, 33, 0, 4]
    batch = paged_batch(lengths, [17, 1, 2, 1, 1, 4])
    w = torch.randn(batch.num_tokens, 16)
    q, keys = torch.randn(batch.num_tokens, 16, 8), [torch.randn(length, 8) for length in lengths]
    if int8:
        q_scale, scales = (torch.rand(q.shape[:2]) + 0.1).half(), [(torch.rand(n, 1) + 0.1).half() for n in lengths]
        codes = torch.randint(-127, 128, q.shape, dtype=torch.int8)
        rows = [torch.randint(-127, 128, row.shape, dtype=torch.int8) for row in keys]
        stored, k_scale, w = batch.cache(rows), batch.cache(scales)[..., 0], w.half()
        q, keys = codes * q_scale[..., None].double(), [a * b.double() for a, b in zip(rows, scales, strict=True)]
        batch.block_table[3, 1] = -1
        got = ops.lightning_indexer_quant(codes, stored, w, q_scale, k_scale, batch.paged, topk)
    else:
        cache = batch.cache(keys)
        batch.block_table[3, 1] = -1
        got = ops.lightning_indexer(q, cache, w, batch.paged, topk)
    assert got.tolist() == brute_force(batch, q, keys, w, topk)


def test_blockwise_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from glm5_kernels import lightning_indexer as reference

    batch = paged_batch([40, 21], [40, 3])
    cache = batch.cache([torch.randn(length, 8) for length in batch.lengths])
    operands = torch.randn(43, 16, 8), cache, torch.randn(43, 16), batch.paged, 7
    whole = ops.lightning_indexer(*operands)
    monkeypatch.setattr(reference, "BLOCK_ELEMENTS", 16 * 40 * 3)
    assert torch.equal(ops.lightning_indexer(*operands), whole)


@pytest.mark.parametrize(("blocks", "heads"), [(0, 16), (0, 4), (2, 16)])
def test_a_request_without_blocks_has_no_positions(blocks: int, heads: int) -> None:
    """Every block of the table is missing, or the cache has none."""
    batch = ops.PagedBatch(torch.tensor([0, 1]), torch.tensor([4]), torch.tensor([[-1]]))
    q, cache, w = torch.randn(1, heads, 64).bfloat16(), torch.randn(blocks, 16, 64).bfloat16(), torch.randn(1, heads)
    assert ops.lightning_indexer(q, cache, w, batch, 2).tolist() == [[-1, -1]]
