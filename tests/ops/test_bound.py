"""Ops bound to operands that stay where they are give the bits of the ops, whatever the operands hold by then."""

from __future__ import annotations

import pytest
import torch

from glm5_kernels import ops, registry
from tests.ops.support.paged_batch import RaggedBatch, paged_batch

BF16 = torch.bfloat16
#: Two steps of three tokens: one with a new token per request, one in which a request brings two.
STEPS = (([9, 14, 3], [1, 1, 1]), ([11, 5], [2, 1]))


pytestmark = pytest.mark.usefixtures("threads")


def steps(columns: int = 4, blocks: int = 12) -> list[RaggedBatch]:
    """The batches, with tables of the same width, for one cache."""
    made = [paged_batch(*step) for step in STEPS]
    for batch in made:
        wide = torch.full((len(batch.lengths), columns), -1, dtype=torch.int32)
        wide[:, : batch.block_table.shape[1]] = batch.block_table
        batch.block_table, batch.num_blocks = wide, blocks
    return made


def linear(n: int, k: int, mode: str) -> ops.LinearWeights:
    if mode == ops.NO_QUANT:
        return ops.LinearWeights((torch.randn(n, k) * 0.1).to(BF16))
    held = torch.randint(-128, 128, (n * k + 64,), dtype=torch.int8)[: n * k].view(n, k)
    more = (torch.tensor([0.02]), torch.tensor([3.0]), torch.randint(-99, 99, (n,), dtype=torch.int32))
    return ops.LinearWeights(held, mode, torch.rand(n) * 0.01, *(more if mode == ops.PER_TENSOR else ()))


@pytest.mark.parametrize("mode", [ops.NO_QUANT, ops.PER_TOKEN, ops.PER_TENSOR])
def test_an_attention_layer(mode: str) -> None:
    """From hidden states to values: every op of a layer, twice, with other numbers in the same places."""
    heads, nope, rank, rope, room = 2, 32, 64, 32, ops.Workspace()
    qkv_a, q_b = linear(32 + rank + rope, 48, mode), linear(heads * (nope + rope), 32, mode)
    w_uk, w_uv = torch.randn(heads, nope, rank).to(BF16), torch.randn(heads, rank, 32).to(BF16)
    q_gamma, kv_gamma = torch.rand(32).to(BF16), torch.rand(rank).to(BF16)
    ckv, kpe, keys = (torch.randn(12, 4, size).to(BF16) for size in (rank, rope, 64))
    tables, hidden = ops.StepTables(3, 4, ckv), torch.zeros(3, 48, dtype=BF16)
    cos, sin, index_q = torch.zeros(3, rope // 2), torch.zeros(3, rope // 2), torch.zeros(3, 4, 64, dtype=BF16)
    index_k, weights, norm = torch.zeros(3, 64, dtype=BF16), torch.zeros(3, 4), (torch.rand(64), torch.rand(64))
    chosen = torch.zeros(3, 6, dtype=torch.int32)
    weights_of = (qkv_a, q_b, w_uk, q_gamma, kv_gamma)
    first = ops.bind("mla_preprocess", hidden, cos, sin, *weights_of, tables.slots, ckv, kpe, 1e-5, room)
    assert first is not None
    index = ops.bind("indexer_preprocess", index_q, index_k, *norm, 1e-6, cos, sin, True, tables.slots, keys, room)
    assert index is not None
    choice = ops.bind("lightning_indexer", index.outputs[0], keys, weights, tables, chosen)
    mixed = ops.bind("sparse_flash_attention", *first.outputs[:2], ckv, kpe, chosen, tables, 0.1, room)
    assert choice is not None and mixed is not None
    last = ops.bind("v_up_proj", mixed.outputs[0], w_uv, room)
    assert last is not None
    for batch in steps():
        for place in (hidden, cos, sin, index_q, index_k, weights):
            place.copy_(torch.randn(place.shape))
        caches = [cache.clone() for cache in (ckv, kpe, keys)]
        tables.fill(batch.paged, batch.slots())
        for bound in (first, index, choice, mixed, last):
            bound()
        want = ops.mla_preprocess(hidden, cos, sin, *weights_of, batch.slots(), *caches[:2], 1e-5)
        turned = ops.indexer_preprocess(index_q, index_k, *norm, 1e-6, cos, sin, True, batch.slots(), caches[2])
        positions = ops.lightning_indexer(turned, caches[2], weights, batch.paged, 6)
        attended = ops.sparse_flash_attention(*want[:2], *caches[:2], positions, batch.paged, 0.1)
        got = (*first.outputs, index.outputs[0], chosen, *mixed.outputs, last.outputs[0], ckv, kpe, keys)
        values = ops.v_up_proj(attended[0], w_uv)
        for a, b in zip(got, (*want, turned, positions, *attended, values, *caches), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("mode", [ops.PER_TOKEN, ops.PER_TENSOR])
@pytest.mark.parametrize("k", [64, 80, 24])
def test_a_linear_layer(mode: str, k: int) -> None:
    w, x, out = linear(48, k, mode), torch.zeros(5, k, dtype=BF16), torch.zeros(5, 48, dtype=BF16)
    bound = ops.bind("int8_linear", x, w, out, ops.Workspace())
    assert bound is not None
    for _ in range(2):
        x.copy_(torch.randn(5, k))
        bound()
        assert torch.equal(out, ops.int8_linear(x, w))


def test_experts_and_that_none_beyond_them_is_read() -> None:
    w13, w2 = (torch.randint(-8, 8, shape, dtype=torch.int8) for shape in ((6, 128, 64), (6, 64, 64)))
    scales, x = (torch.rand(6, 128) * 0.1, torch.rand(6, 64) * 0.1), torch.zeros(3, 64, dtype=BF16)
    weights, ids = torch.zeros(3, 2), torch.zeros(3, 2, dtype=torch.int64)
    bound = ops.bind("w4a8_moe", x, weights, ids, w13, scales[0], w2, scales[1], ops.Workspace())
    assert bound is not None
    for chosen in ([[0, 5], [5, 0], [1, 2]], [[3, 3], [-1, 3], [-1, -1]]):
        x.copy_(torch.randn(x.shape))
        weights.copy_(torch.rand(weights.shape))
        ids.copy_(torch.tensor(chosen))
        bound()
        assert torch.equal(bound.outputs[0], ops.w4a8_moe(x, weights, ids, w13, scales[0], w2, scales[1]))
    ids[1, 1] = 6
    with pytest.raises(ops.KernelInputError, match="names expert 6"):
        bound()


def test_tables_are_looked_at_when_they_are_filled() -> None:
    cache, batch = torch.zeros(12, 4, 16), steps()[0]
    tables = ops.StepTables(3, 4, cache)
    tables.fill(batch.paged, batch.slots())
    assert tables.visible.tolist() == [9, 14, 3] and tables.request.tolist() == [0, 1, 2]
    block = batch.block_table.clone()
    block[1, 3] = 12
    for bad, slots, message in (
        (batch.paged._replace(block_table=block), batch.slots(), "names block 12"),
        (batch.paged, torch.tensor([0, 1, 48]), "slot 48 is outside"),
        (batch.paged._replace(query_start_loc=torch.tensor([0, 1, 2, 4])), batch.slots(), "must rise"),
        (batch.paged, batch.slots()[:2], "slot_mapping has shape"),
    ):
        with pytest.raises(ops.KernelInputError, match=message):
            tables.fill(bad, slots)
    tables.fill(batch.paged, batch.slots())
    with pytest.raises(ops.KernelInputError, match="cache has shape"):
        tables.require(cache[:11])


def test_numbers_that_change_in_their_place_are_looked_at_again() -> None:
    """As vLLM's drafts do between two steps: the tensors are the same ones."""
    cache, batch = torch.zeros(12, 4, 16), steps()[0]
    tables, paged, slots = ops.StepTables(3, 4, cache), batch.paged, batch.slots()
    tables.fill(paged, slots)
    made = tables.once(lambda held: held.visible.tolist())
    paged.seq_lens.sub_(1)
    tables.fill(paged, slots)
    assert tables.visible.tolist() == [8, 13, 2] and made == [9, 14, 3]
    slots[0] = 48
    with pytest.raises(ops.KernelInputError, match="slot 48"):
        tables.fill(paged, slots)


def test_only_the_compiled_version_is_bound() -> None:
    latent, w_uv = torch.zeros(2, 2, 32), torch.zeros(2, 32, 32)
    assert ops.bind("v_up_proj", latent, w_uv, ops.Workspace()) is not None
    registry.select("reference")
    assert ops.bind("v_up_proj", latent, w_uv, ops.Workspace()) is None
    registry.select(None)


def test_what_does_not_fit_is_refused_when_it_is_bound() -> None:
    w, x = linear(48, 64, ops.PER_TOKEN), torch.zeros(5, 64, dtype=BF16)
    for out in (torch.zeros(5, 47, dtype=BF16), torch.zeros(5, 48), torch.zeros(48, 5, dtype=BF16).t()):
        with pytest.raises(ops.KernelInputError, match="out"):
            ops.bind("int8_linear", x, w, out, ops.Workspace())
    with pytest.raises(ops.KernelInputError, match="w_uv"):
        ops.bind("v_up_proj", torch.zeros(2, 2, 32), torch.zeros(2, 31, 32), ops.Workspace())
