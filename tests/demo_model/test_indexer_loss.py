"""The tiled indexer loss is the plain one: value and gradients, dense, packed and sparse."""

from __future__ import annotations

import pytest
import torch

from benchmarks.training import indexer_loss
from benchmarks.training.indexer_loss import Attention, Index, Visible

BATCH, HEADS, INDEX_HEADS = 2, 3, 4
MASKS = ("causal", "packed", "selected", "one_key", "blind")


def operands(length: int, dtype: torch.dtype) -> tuple[Attention, Index]:
    generator = torch.Generator().manual_seed(length)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(BATCH, length, *shape, dtype=dtype, generator=generator)

    index = Index(make(INDEX_HEADS, 6), make(6), make(INDEX_HEADS))
    return Attention(make(HEADS, 5), make(HEADS, 5), 0.7), Index(*(tensor.requires_grad_() for tensor in index))


def visible(mask: str, length: int) -> Visible:
    generator = torch.Generator().manual_seed(1)
    if mask == "causal":
        return indexer_loss.seen_in_texts(torch.zeros(BATCH, length, dtype=torch.long))
    if mask == "packed":
        return indexer_loss.seen_in_texts(torch.randint(0, 3, (BATCH, length), generator=generator).sort().values)
    past = torch.ones(length, length, dtype=torch.bool).tril().expand(BATCH, -1, -1).clone()
    if mask == "one_key":
        past = torch.eye(length, dtype=torch.bool).expand(BATCH, -1, -1)
    if mask == "blind":
        past[:, ::3] = False
    if mask == "selected":
        best = torch.rand(BATCH, length, length, generator=generator).masked_fill(~past, -1.0).topk(3)
        return indexer_loss.seen_if_chosen(best.indices.masked_fill(best.values < 0, -1))
    return indexer_loss.seen_in(past)


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexer_loss, "QUERIES", 4)
    monkeypatch.setattr(indexer_loss, "KEYS", 3)


@pytest.mark.parametrize("length", [3, 7, 30])
@pytest.mark.parametrize("mask", MASKS)
def test_value_and_gradients_are_those_of_the_plain_loss(mask: str, length: int) -> None:
    attention, index = operands(length, torch.float64)
    results = []
    for function in (indexer_loss.plain_indexer_loss, indexer_loss.indexer_loss):
        loss = function(attention, index, visible(mask, length))
        results.append((loss, *torch.autograd.grad(3.0 * loss, index)))  # a factor: backward must use its argument
    for plain, tiled in zip(*results, strict=True):
        torch.testing.assert_close(tiled, plain, rtol=1e-10, atol=1e-12)


def test_no_gradient_reaches_attention() -> None:
    attention, index = operands(8, torch.float32)
    attention = attention._replace(q=attention.q.requires_grad_(), k=attention.k.requires_grad_())
    indexer_loss.indexer_loss(attention, index, visible("causal", 8)).backward()
    assert attention.q.grad is None and attention.k.grad is None and index.w.grad is not None
