"""The indexer and attention in C++ against the plain ones, on every instruction set of this CPU."""

from __future__ import annotations

import math

import pytest
import torch

from glm5_kernels.native import attention
from glm5_kernels.paged_cache import PagedBatch
from glm5_kernels.parity.cases import cases
from tests.ops.support.implementations import cpu, reference
from tests.ops.support.paged_batch import paged_batch

pytestmark = pytest.mark.usefixtures("instruction_set")


@pytest.mark.parametrize(("heads", "dtype"), [(64, torch.bfloat16), (16, torch.bfloat16), (8, torch.float32)])
def test_indexer_breaks_ties_and_passes_over_missing_blocks(heads: int, dtype: torch.dtype) -> None:
    """Integers: scores are exact, so every entry is the same, ties included; no key of a block that the table does not
    name is chosen, whichever kernel takes such sizes."""
    batch = paged_batch([400, 40], [2, 40], block_size=32)
    cache = batch.cache([torch.randint(-2, 3, (length, 64)).to(dtype) for length in (400, 40)])
    batch.block_table[0, [0, 5]] = -1
    q, w = torch.randint(-2, 3, (42, heads, 64)).to(dtype), torch.randint(-2, 3, (42, heads)).float()
    got, want = (op.lightning_indexer(q, cache, w, batch.paged, 350) for op in (cpu, reference))
    first = got[:2]
    assert torch.equal(got, want) and not ((first >= 0) & ((first < 32) | (first // 32 == 5))).any()


@pytest.mark.parametrize("k", [1, 7, 100, 1000])
def test_the_best_positions_are_the_first_of_a_stable_sort(k: int) -> None:
    """Scores that are the keys' scales: few different values, both zeros, infinities; NaN is never chosen."""
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, 1e-40, -3.5, math.nan])
    scores = values[torch.randint(0, 9, (600,))]
    batch = PagedBatch(torch.tensor([0, 1]), torch.tensor([600]), torch.arange(5)[None])
    ones = torch.eye(1, 64, dtype=torch.int8)
    scales = torch.cat([scores, torch.zeros(40)]).view(5, 128)
    got = cpu.lightning_indexer_quant(
        ones[None], ones.expand(5, 128, 64), torch.ones(1, 1), torch.ones(1, 1), scales, batch, k
    )
    usable = [p for p in range(600) if scores[p] == scores[p]]
    want = sorted(sorted(usable, key=lambda p: (-float(scores[p]), p))[:k])
    assert got[0].tolist() == want + [-1] * (k - len(want))


def test_finite_numbers_do_not_need_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens with NaN are computed again by the reference: it would hide a NaN that the C++ makes."""
    reference_module, again = attention.attention_reference, lambda _: pytest.fail("computed again")
    monkeypatch.setattr(reference_module, "sparse_flash_attention", again)
    case = next(case for case in cases(ops=["sparse_flash_attention"]) if case.variant.startswith("chunk, bfloat16"))
    assert cpu.sparse_flash_attention(*case.arguments)[0].isfinite().all()


def test_attention_survives_large_scores() -> None:
    """Online softmax: a later tile with far larger scores must wipe out what came before, not overflow."""
    batch = paged_batch([256], [1], block_size=128)
    keys = torch.randn(256, 48)
    keys[200] *= 100
    cache = batch.cache([keys])
    arguments = (
        torch.randn(1, 8, 32) * 10, torch.randn(1, 8, 16), cache[..., :32], cache[..., 32:],
        torch.arange(256, dtype=torch.int32)[None], batch.paged, 1.0,
    )  # fmt: skip
    (got, got_lse), (want, want_lse) = (op.sparse_flash_attention(*arguments) for op in (cpu, reference))
    torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(got_lse, want_lse, atol=1e-2, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_threads_change_no_bit(dtype: torch.dtype) -> None:
    """One request is shared by all threads, several are dealt out; few tokens divide their heads."""
    batch = paged_batch([5000, 77], [1, 30], block_size=16)
    q, w, before = torch.randn(31, 64, 64).to(dtype), torch.randn(31, 64), torch.get_num_threads()
    keys = batch.cache([torch.randn(5000, 64).to(dtype), torch.randn(77, 64).to(dtype)])
    one, results = PagedBatch(*(x[:n] for x, n in zip(batch.paged, (2, 1, 1), strict=True))), []
    for count in (1, 3):
        torch.set_num_threads(count)
        selected = cpu.lightning_indexer(q, keys, w, batch.paged, 32)
        attended = [
            cpu.sparse_flash_attention(q[:t], q[:t, :, :32], keys, keys[..., :32], selected[:t], few, 0.1)
            for t, few in ((31, batch.paged), (1, one))
        ]
        results.append((selected, *attended[0], *attended[1]))
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["query", "key"])
@pytest.mark.parametrize("heads", [8, 4, 1])
def test_what_is_no_number_comes_through(heads: int, where: str, bad: float, dtype: torch.dtype) -> None:
    """A broken activation or cache row must be seen as the reference shows it, not become a plausible answer."""
    batch = paged_batch([200], [2], block_size=16)
    for index_heads in (heads, 4 * heads):
        q, w = torch.randn(2, index_heads, 128).to(dtype), torch.rand(2, index_heads).to(dtype)
        keys, w[:, 0] = torch.randn(200, 128).to(dtype), -1.0
        (q[1, -1] if where == "query" else keys[70])[5] = bad
        got, want = (op.lightning_indexer(q, batch.cache([keys]), w, batch.paged, 200) for op in (cpu, reference))
        assert torch.equal(got, want) and not ((got[:, :-1] < 0) & (got[:, 1:] >= 0)).any()  # -1 only at the end

    nope, pe, rows = (torch.randn(*size).to(dtype) for size in ((2, heads, 64), (2, heads, 32), (200, 96)))
    (pe[1, -1] if where == "query" else rows[70])[5] = bad
    cache = batch.cache([rows])
    arguments = nope, pe, cache[..., :64], cache[..., 64:], torch.arange(150).int().expand(2, -1), batch.paged, 0.1
    (got, got_lse), (want, want_lse) = (op.sparse_flash_attention(*arguments) for op in (cpu, reference))
    assert not want.isfinite().all()
    torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2, equal_nan=True)
    assert torch.equal(got_lse.isfinite(), want_lse.isfinite())
