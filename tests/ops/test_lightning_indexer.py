"""The Lightning Indexer against hand-worked numbers, a brute-force reading of its definition, and transformers."""

from __future__ import annotations

import pytest
import torch

from glm5_kernels import ops
from tests.ops.support.paged_batch import RaggedBatch, paged_batch

pytestmark = pytest.mark.usefixtures("implementation")


def run(batch: RaggedBatch, q: torch.Tensor, keys: list[torch.Tensor], w: torch.Tensor, topk: int) -> torch.Tensor:
    return ops.lightning_indexer(q, batch.cache(keys), w, batch.paged, topk)


def brute_force(
    batch: RaggedBatch, q: torch.Tensor, keys: list[torch.Tensor], w: torch.Tensor, topk: int
) -> list[list[int]]:
    """Score every visible position in a Python loop; take the first by (-score, position)."""
    out = []
    for t, (b, visible) in enumerate(batch.tokens()):
        scores = []
        for s in range(visible):
            dots = [max(float(q[t, h].double() @ keys[b][s].double()), 0.0) for h in range(q.shape[1])]
            scores.append(sum(float(w[t, h]) * dot for h, dot in enumerate(dots)))
        out.append(sorted(sorted(range(visible), key=lambda s: (-scores[s], s))[:topk]))
    return out


def test_worked_example_with_a_tie() -> None:
    """fused-ops.md 1.2: scores 1, -2, 0, 0; the tie at 0 goes to the lower position."""
    q = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    keys = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 1.0], [-1.0, -1.0]])
    batch = paged_batch([4], [1])
    assert run(batch, q, [keys], torch.tensor([[1.0, -2.0]]), 3).tolist() == [[0, 2, 3]]


def test_all_scores_equal_gives_the_first_positions() -> None:
    """Catches an unstable sort: 300 equal scores must give 0, 1, 2, ... on every run."""
    batch = paged_batch([300], [1], block_size=16)
    out = run(batch, torch.zeros(1, 4, 8), [torch.randn(300, 8)], torch.ones(1, 4), 64)
    assert out.tolist() == [list(range(64))]


@pytest.mark.parametrize("topk", [1, 5, 64])
def test_matches_brute_force_on_ragged_paged_batches(topk: int) -> None:
    batch = paged_batch([17, 1, 9, 33, 4], [17, 1, 2, 1, 4])
    q, w = torch.randn(batch.num_tokens, 16, 8), torch.randn(batch.num_tokens, 16)
    keys = [torch.randn(length, 8) for length in batch.lengths]
    out = run(batch, q, keys, w, topk)
    for row, want in zip(out.tolist(), brute_force(batch, q, keys, w, topk), strict=True):
        assert row == want + [-1] * (topk - len(want))


def test_never_returns_a_position_that_is_not_visible() -> None:
    """HF returns masked positions for short prefixes; ours must end in -1 instead."""
    batch = paged_batch([6], [6])
    out = run(batch, torch.randn(6, 16, 8), [torch.randn(6, 8)], -torch.rand(6, 16), 8)  # all scores <= 0
    for i, row in enumerate(out.tolist()):
        assert sorted(row[: i + 1]) == list(range(i + 1)) and row[i + 1 :] == [-1] * (7 - i)


def test_request_without_visible_positions_is_all_minus_one() -> None:
    """Padding requests of a server have length 0 and may still have a query token."""
    batch = paged_batch([0, 3], [1, 1])
    out = run(batch, torch.randn(2, 16, 8), [torch.randn(0, 8), torch.randn(3, 8)], torch.rand(2, 16), 4)
    assert out[0].tolist() == [-1] * 4 and sorted(out[1].tolist()) == [-1, 0, 1, 2]


def test_missing_block_hides_its_positions() -> None:
    """A -1 inside the block table must not read block -1 (Python's last one)."""
    batch = paged_batch([12], [1])
    keys = [torch.randn(12, 8)]
    cache = batch.cache(keys).nan_to_num(1e9)
    table = batch.block_table.clone()
    table[0, 1] = -1
    out = ops.lightning_indexer(
        torch.randn(1, 16, 8), cache, torch.rand(1, 16), batch.paged._replace(block_table=table), 12
    )
    assert sorted(out[0].tolist()) == [-1] * 4 + [0, 1, 2, 3, 8, 9, 10, 11]


def test_blockwise_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from glm5_kernels.lightning_indexer import reference

    batch = paged_batch([40, 21], [40, 3])
    q, w = torch.randn(43, 16, 8), torch.randn(43, 16)
    keys = [torch.randn(length, 8) for length in batch.lengths]
    whole = run(batch, q, keys, w, 7)
    monkeypatch.setattr(reference, "BLOCK_ELEMENTS", 16 * 40 * 3)
    assert torch.equal(run(batch, q, keys, w, 7), whole)
