"""What must not change a result: block order, other requests of the batch, chunks of a prefill, padding, scaling.

Every token is computed by itself and in one order, so all of it holds to the bit.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from glm5_kernels import ops
from tests.ops.support.paged_batch import RaggedBatch, paged_batch

pytestmark = pytest.mark.usefixtures("implementation")
HEADS, RANK, ROPE, TOPK = 4, 32, 16, 6

requests = st.lists(
    st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))), min_size=1, max_size=4
)
quick = settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


class Step:
    """Queries, keys and both ops on one batch."""

    def __init__(self, batch: RaggedBatch, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.batch, tokens = batch, batch.num_tokens
        self.q = torch.randn(tokens, HEADS, RANK, generator=generator)
        self.pe = torch.randn(tokens, HEADS, ROPE, generator=generator)
        self.w = torch.randn(tokens, HEADS, generator=generator)
        self.rows = [torch.randn(n, RANK + ROPE, generator=generator) for n in batch.lengths]

    def run(self, batch: RaggedBatch | None = None, part: slice = slice(None), width: int = 0) -> list[torch.Tensor]:
        """(chosen positions, attention output, lse) for the tokens `part`, on another batch layout if given."""
        batch = batch or self.batch
        cache = batch.cache(self.rows)
        table = torch.nn.functional.pad(batch.block_table, (0, width), value=-1)
        paged = batch.paged._replace(block_table=table)
        selected = ops.lightning_indexer(self.q[part], cache[..., :RANK], self.w[part], paged, TOPK)
        caches = cache[..., :RANK], cache[..., RANK:]
        return [selected, *ops.sparse_flash_attention(self.q[part], self.pe[part], *caches, selected, paged, 0.2)]


def equal(got: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def batch_of(sizes: list[tuple[int, int]], seed: int = 0) -> RaggedBatch:
    return paged_batch([n for n, _ in sizes], [new for _, new in sizes], seed=seed)


@quick
@given(requests, st.integers(1, 5))
def test_where_blocks_lie_and_how_wide_the_table_is(sizes: list[tuple[int, int]], seed: int) -> None:
    step = Step(batch_of(sizes))
    assert equal(step.run(batch_of(sizes, seed)), step.run())
    assert equal(step.run(width=seed), step.run())


@quick
@given(requests)
def test_one_batch_is_as_many_batches_of_one(sizes: list[tuple[int, int]]) -> None:
    step = Step(batch_of(sizes))
    whole, start = step.run(), 0
    for number, (length, new) in enumerate(sizes):
        alone = Step(batch_of([(length, new)]))
        part = slice(start, start + new)
        alone.q, alone.pe, alone.w, alone.rows = step.q[part], step.pe[part], step.w[part], [step.rows[number]]
        assert equal(alone.run(), [value[part] for value in whole])
        start += new


@quick
@given(st.integers(2, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n - 1))))
def test_a_prefill_may_be_cut_anywhere(sizes: tuple[int, int]) -> None:
    """The first piece sees a cache in which the later rows are not written yet."""
    length, cut = sizes
    step = Step(batch_of([(length, length)]))
    whole = step.run()
    early = replace(step.batch, lengths=[cut], new=[cut])
    late = replace(step.batch, new=[length - cut])
    rows, step.rows = step.rows, [step.rows[0][:cut]]
    first = step.run(early, slice(0, cut))
    step.rows = rows
    second = step.run(late, slice(cut, length))
    assert equal([torch.cat(pair) for pair in zip(first, second, strict=True)], whole)


def test_what_lies_beside_the_slots_is_not_touched() -> None:
    """MLA preprocess writes the slots it is given and nothing else, in strided caches as well."""
    cache = torch.randint(-100, 100, (3, 4, RANK + ROPE + 5)).float()
    before, slots = cache.clone(), torch.tensor([7, -1, 2])
    linear = ops.LinearWeights(torch.randn(6 + RANK + ROPE, 10))
    q_b = ops.LinearWeights(torch.randn(HEADS * (5 + ROPE), 6))
    ops.mla_preprocess(
        torch.randn(3, 10), torch.randn(3, ROPE // 2), torch.randn(3, ROPE // 2), linear, q_b,
        torch.randn(HEADS, 5, RANK), torch.ones(6), torch.ones(RANK), slots, cache[..., :RANK],
        cache[..., RANK : RANK + ROPE], 1e-5,
    )  # fmt: skip
    changed = (cache != before).nonzero()
    assert {(int(block), int(row)) for block, row, _ in changed} == {(1, 3), (0, 2)}
    assert int(changed[:, 2].max()) < RANK + ROPE
