"""Pools of index keys against their formula in fp64: every cut of a prompt, rejected drafts, the choice of pools."""

from __future__ import annotations

import pytest
import torch

from glm5_kernels import ops
from tests.ops.support.paged_batch import paged_batch

pytestmark = pytest.mark.usefixtures("implementation")
POOL, DIM, RING = 4, 32, 8


class Sequence:
    """A request whose pools lie in blocks 2, 0 and 1, of 5 pools each, and whose open pool lies in ring 1."""

    def __init__(self, length: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.k, self.gate = torch.randn(2, length, DIM).to(dtype)
        self.ape = torch.randn(POOL, DIM)
        self.tail = torch.full((3, 2, RING, DIM), float("nan"), dtype=dtype)
        self.cache = torch.full((3, 5, DIM), float("nan"), dtype=dtype)

    def step(self, start: int, end: int, k: torch.Tensor | None = None) -> None:
        batch = ops.PagedBatch(torch.tensor([0, end - start]), torch.tensor([end]), torch.tensor([[2, 0, 1]]))
        tokens = (self.k if k is None else k)[start:end], self.gate[start:end]
        ops.indexer_pool(*tokens, self.ape, batch, torch.tensor([1]), self.tail, self.cache)

    @property
    def pools(self) -> torch.Tensor:
        """The keys of all pools that fit the cache."""
        return self.cache[[2, 0, 1]].flatten(0, 1)

    def expected(self) -> torch.Tensor:
        whole = len(self.k) // POOL
        k, gate = (x[: whole * POOL].double().view(whole, POOL, DIM) for x in (self.k, self.gate))
        weight = (gate + self.ape.double()).exp()
        return (weight * k).sum(1) / weight.sum(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [1, 3, 4, 7, 8, 40])
def test_pools_are_their_formula(length: int, dtype: torch.dtype) -> None:
    sequence = Sequence(length, dtype)
    sequence.step(0, length)
    want, rounding = sequence.expected(), torch.finfo(dtype).eps
    torch.testing.assert_close(sequence.pools[: len(want)].double(), want, rtol=rounding, atol=2e-6)
    assert bool(sequence.pools[len(want) :].isnan().all())
    assert bool(sequence.tail[[0, 2]].isnan().all())


@pytest.mark.parametrize("cut", range(1, 23))
def test_every_cut_gives_the_same_pools(cut: int) -> None:
    whole, parts = Sequence(23), Sequence(23)
    parts.k, parts.gate, parts.ape = whole.k, whole.gate, whole.ape
    whole.step(0, 23)
    parts.step(0, cut)
    parts.step(cut, 23)
    assert torch.equal(parts.pools[:5], whole.pools[:5])
    tail = torch.arange(20, 23) % RING
    assert torch.equal(parts.tail[1][:, tail], whole.tail[1][:, tail])


@pytest.mark.parametrize("accepted", range(6))
@pytest.mark.parametrize("start", range(8, 12))
def test_rejected_drafts_leave_nothing(start: int, accepted: int) -> None:
    """A token and RING - POOL drafts, of which some stay; the others' places are written again."""
    sequence, drafts = Sequence(23), RING - POOL
    kept = start + min(1 + accepted, 1 + drafts)
    wrong = sequence.k.clone()
    wrong[kept:] = 99.0
    sequence.step(0, start)
    sequence.step(start, start + 1 + drafts, wrong)
    for position in range(kept, 23):
        sequence.step(position, position + 1)
    want = sequence.expected()
    torch.testing.assert_close(sequence.pools[: len(want)].double(), want, rtol=0.01, atol=2e-6)


def test_a_batch_is_its_requests() -> None:
    """A prompt, one token that completes a pool, padding, drafts: each as if it were alone; others stay."""
    lengths, new = [13, 8, 0, 10, 3], [13, 1, 2, 3, 0]
    batch = paged_batch([-(-length // POOL) for length in lengths], new, block_size=2)
    paged = batch.paged._replace(seq_lens=torch.tensor(lengths).int())
    tokens, ape = torch.randn(2, sum(new), DIM), torch.randn(POOL, DIM)
    tail, cache = torch.randn(5, 2, RING, DIM), torch.zeros(batch.num_blocks, 2, DIM)
    rings, got = torch.tensor([3, 0, -1, 4, 1]), (tail.clone(), cache.clone())
    ops.indexer_pool(*tokens, ape, paged, rings, *got)
    start = 0
    for b, count in enumerate(new):
        one = ops.PagedBatch(torch.tensor([0, count]), paged.seq_lens[b : b + 1], paged.block_table[b : b + 1])
        ops.indexer_pool(*tokens[:, start : start + count], ape, one, rings[b : b + 1], tail, cache)
        start += count
    assert torch.equal(got[0], tail)
    assert torch.equal(got[1], cache)
    assert int((cache != 0).any(-1).sum()) == 3 + 1 + 1  # pools 0-2 of the first, 1 of the second, 1 of the fourth


@pytest.mark.parametrize("length", [1, 3, 4, 5, 11, 12, 15, 16, 17, 39])
@pytest.mark.parametrize("topk", [4, 12, 64])
def test_chosen_positions_are_the_best_pools_and_the_open_one(length: int, topk: int) -> None:
    new = min(length, 5)
    batch = paged_batch([-(-length // POOL)], [new], block_size=2)
    q, w, keys = torch.randn(new, 16, 16), torch.randn(new, 16), torch.randn(-(-length // POOL), 16)
    paged = batch.paged._replace(seq_lens=torch.tensor([length]).int())
    got = ops.lightning_indexer(q, batch.cache([keys]), w, paged, topk, POOL)
    assert got.shape == (new, topk + POOL - 1)
    for t, row in enumerate(got.tolist()):
        visible = length - new + t + 1
        scores = [
            float((w[t].double() * (q[t].double() @ key.double()).relu()).sum()) for key in keys[: visible // POOL]
        ]
        best = sorted(sorted(range(len(scores)), key=lambda pool: -scores[pool])[: topk // POOL])
        positions = [pool * POOL + i for pool in best for i in range(POOL)]
        positions += range(visible // POOL * POOL, visible)
        assert row == positions + [-1] * (len(row) - len(positions))


@pytest.mark.parametrize("blocks", [(0, 5, [[-1]]), (2, 5, [[-1, -1]]), (2, 0, [[]])], ids=str)
def test_a_pool_without_a_place_is_not_written(blocks: tuple[int, int, list[list[int]]]) -> None:
    """No blocks, missing ones, a table without columns; the ring takes the tokens all the same."""
    num_blocks, block_size, table = blocks
    tail, cache = torch.zeros(1, 2, RING, DIM), torch.zeros(num_blocks, block_size, DIM)
    batch = ops.PagedBatch(torch.tensor([0, 5]), torch.tensor([5]), torch.tensor(table, dtype=torch.int32))
    k, gate = torch.randn(2, 5, DIM)
    ops.indexer_pool(k, gate, torch.zeros(POOL, DIM), batch, torch.tensor([0]), tail, cache)
    assert torch.equal(tail[0, :, :5], torch.stack([k, gate]))
    assert not cache.any()


def test_no_tokens() -> None:
    tail, none = torch.ones(1, 2, RING, DIM), torch.zeros(0, DIM)
    for starts, lengths in (([0], []), ([0, 0], [7])):
        table = torch.zeros(len(lengths), 1, dtype=torch.int32)
        batch = ops.PagedBatch(torch.tensor(starts), torch.tensor(lengths, dtype=torch.int64), table)
        rings = torch.zeros(len(lengths), dtype=torch.int64)
        ops.indexer_pool(none, none, torch.zeros(POOL, DIM), batch, rings, tail, torch.zeros(1, 5, DIM))
    assert bool((tail == 1).all())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_in_its_pool_and_channel(value: float) -> None:
    sequence = Sequence(12, torch.float32)
    sequence.step(0, 12)
    want = sequence.pools[:3].clone()
    for tensor in (sequence.k, sequence.gate):
        before, tensor[5, 3] = tensor[5, 3].clone(), value
        sequence.step(0, 12)
        changed = sequence.pools[:3] != want
        tensor[5, 3] = before
        assert changed.nonzero().tolist() == [[1, 3]]
