"""The tiled indexer loss is the plain one: value and gradients, dense, packed and sparse, and in training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.training import attention, indexer_loss, optim, stages, train
from benchmarks.training.indexer_loss import Attention, Index, Visible
from benchmarks.training.rows import RowSource
from glm5_ascend.fidelity.evaluation.python_docs import documents

BATCH, HEADS, LEARNERS = 2, 3, 4
KINDS = ("causal", "packed", "chosen", "one_key", "blind")


def sides(length: int, dtype: torch.dtype) -> tuple[Attention, Index]:
    generator = torch.Generator().manual_seed(length)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(BATCH, length, *shape, dtype=dtype, generator=generator)

    learner = Index(make(LEARNERS, 6), make(6), make(LEARNERS))
    return Attention(make(HEADS, 5), make(HEADS, 5), 0.7), Index(*(each.requires_grad_() for each in learner))


def view(kind: str, length: int) -> Visible:
    generator = torch.Generator().manual_seed(1)
    if kind == "causal":
        return indexer_loss.seen_in_texts(torch.zeros(BATCH, length, dtype=torch.long))
    if kind == "packed":
        return indexer_loss.seen_in_texts(torch.randint(0, 3, (BATCH, length), generator=generator).sort().values)
    past = torch.ones(length, length, dtype=torch.bool).tril().expand(BATCH, -1, -1).clone()
    if kind == "one_key":
        past = torch.eye(length, dtype=torch.bool).expand(BATCH, -1, -1)
    if kind == "blind":
        past[:, ::3] = False
    if kind == "chosen":
        chosen = torch.rand(BATCH, length, length, generator=generator).masked_fill(~past, -1.0).topk(3)
        return indexer_loss.seen_if_chosen(chosen.indices.masked_fill(chosen.values < 0, -1))
    return indexer_loss.seen_in(past)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexer_loss, "QUERIES", 4)
    monkeypatch.setattr(indexer_loss, "KEYS", 3)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_finite_differences(kind: str, small_tiles: None) -> None:
    target, learner = sides(10, torch.float64)

    def loss(q: torch.Tensor, k: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return indexer_loss.indexer_loss(target, Index(q, k, w), view(kind, 10))

    assert torch.autograd.gradcheck(loss, tuple(learner), raise_exception=True)


@pytest.mark.parametrize(
    ("length", "kind"),  # three keys to choose from
    [(length, kind) for length in (1, 7, 30) for kind in KINDS if kind != "chosen" or length >= 3],
)
def test_value_and_gradients_are_those_of_the_plain_loss(kind: str, length: int, small_tiles: None) -> None:
    target, learner = sides(length, torch.float64)
    found = []
    for function in (indexer_loss.plain_indexer_loss, indexer_loss.indexer_loss):
        loss = function(target, learner, view(kind, length))
        found.append((loss, *torch.autograd.grad(3.0 * loss, learner)))  # a factor: backward must use what comes in
    for plain, tiled in zip(*found, strict=True):
        torch.testing.assert_close(tiled, plain, rtol=1e-10, atol=1e-12)


def test_fp32_and_tiles_of_the_real_size() -> None:
    length = indexer_loss.KEYS + indexer_loss.QUERIES + 5
    target, learner = sides(length, torch.float32)
    found = []
    for function in (indexer_loss.plain_indexer_loss, indexer_loss.indexer_loss):
        loss = function(target, learner, view("causal", length))
        found.append((loss, *torch.autograd.grad(loss, learner)))
    for plain, tiled in zip(*found, strict=True):
        torch.testing.assert_close(tiled, plain, rtol=1e-3, atol=1e-7)


def test_no_gradient_reaches_attention() -> None:
    target, learner = sides(8, torch.float32)
    target = target._replace(q=target.q.requires_grad_(), k=target.k.requires_grad_())
    indexer_loss.indexer_loss(target, learner, view("causal", 8)).backward()
    assert target.q.grad is None and target.k.grad is None and learner.w.grad is not None


def test_a_real_training_stage_takes_the_same_course(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The warm-up of a fresh model, once with each loss: same rows, same start, the same falling curve."""
    tokenizer = train.build_tokenizer()
    small = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 2}
    curves = []
    for function in (indexer_loss.plain_indexer_loss, indexer_loss.indexer_loss):
        monkeypatch.setattr(attention, "indexer_loss", function)
        model, mtp = train.build_model(tokenizer, seed=4, **small)
        rows = RowSource(tokenizer, documents(held_out=False)[:40], rows=2, length=160, text_share=0.5, seed=0)
        run = stages.Run(model, mtp, rows, tmp_path / "log.jsonl", bf16=False)
        index = [(name, weight) for name, weight in model.named_parameters() if ".indexer." in name]
        optimizers = optim.build([*index, *(("mtp." + n, w) for n, w in mtp.named_parameters())], 0.02, 0.003)
        stages.train_stage(run, "warmup", stages.warmup_step, optimizers, 30, (1.0, 1.0, 0.5))
        curves.append([line["index"] for line in run.history])
    plain, tiled = curves
    assert plain[-1] < 0.9 * plain[0]
    assert tiled == pytest.approx(plain, rel=0.02)
