"""The Lightning Indexer by scores of int16 chooses what it chooses by fp32 scores alone, for every input.

Only where the processor has the instructions and none for bf16; `test_lesser_processors.py` runs it as such.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numba import njit

from glm5_kernels.compiled.words import WORDS
from glm5_kernels.lightning_indexer import cpu, cpu_words, reference
from tests.ops.support.paged_batch import RaggedBatch, paged_batch

pytestmark = pytest.mark.skipif(WORDS is None, reason="this processor multiplies in bf16 or fp32")
Choose = Callable[..., torch.Tensor]


@pytest.fixture
def agrees(monkeypatch: pytest.MonkeyPatch) -> Choose:
    """The choice of operands in bf16, after it has been compared with the one by fp32 scores."""

    def choose(
        batch: RaggedBatch, q: torch.Tensor, keys: list[torch.Tensor], w: torch.Tensor, topk: int,
        table: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        q, cache, by_words = q.bfloat16(), batch.cache([key.bfloat16() for key in keys]), []
        paged = batch.paged if table is None else batch.paged._replace(block_table=table)
        monkeypatch.setattr(cpu, "LONG", 0)
        monkeypatch.setattr(cpu, "choose_by_words", lambda *a: (by_words.append(1), cpu_words.choose_by_words(*a)))
        got = cpu.lightning_indexer(q, cache, w, paged, topk)
        assert by_words
        monkeypatch.setattr(cpu, "WORDS", None)
        assert torch.equal(got, cpu.lightning_indexer(q, cache, w, paged, topk))
        assert len(by_words) == 1
        monkeypatch.undo()
        return got

    return choose


def operands(
    batch: RaggedBatch, heads: int = 32, dim: int = 128
) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    q, keys = torch.randn(batch.num_tokens, heads, dim), [torch.randn(length, dim) for length in batch.lengths]
    return q, keys, torch.randn(batch.num_tokens, heads)


@pytest.mark.parametrize("topk", [1, 60, 500, 2000])
@pytest.mark.parametrize("heads,dim", [(32, 128), (64, 32), (17, 96), (33, 64)])
def test_random_keys(agrees: Choose, topk: int, heads: int, dim: int) -> None:
    batch = paged_batch([700, 1, 900, 61], [3, 1, 70, 2], block_size=16)
    agrees(batch, *operands(batch, heads, dim), topk)


def test_integers_whose_ties_are_exact(agrees: Choose) -> None:
    """Against the reference, too: fp32 has every score exactly, and hundreds of keys share the last one chosen."""
    batch = paged_batch([1500], [4], block_size=16)
    q, w = torch.randint(-1, 2, (4, 32, 128)).float(), torch.randint(-1, 2, (4, 32)).float()
    keys = [torch.randint(-1, 2, (1500, 128)).float() * (torch.rand(1500, 128) < 0.05)]
    got = agrees(batch, q, keys, w, 300)
    assert torch.equal(got, reference.lightning_indexer(q, batch.cache(keys), w, batch.paged, 300))


@pytest.mark.parametrize("step", [0.0, 2.0**-9, 2.0**-7, 2.0**-4])
def test_keys_closer_than_the_rounding(agrees: Choose, step: float) -> None:
    """Copies of five keys, each with one element changed a little or not at all: nearly all must be scored again."""
    batch = paged_batch([1200], [3], block_size=16)
    q, _, w = operands(batch)
    keys = torch.randn(5, 128)[torch.randint(0, 5, (1200,))]
    keys[torch.arange(1200), torch.randint(0, 128, (1200,))] *= 1 + step * torch.randn(1200)
    agrees(batch, q, [keys], w, 256)


def test_equal_keys_give_the_first_positions(agrees: Choose) -> None:
    batch = paged_batch([800], [1], block_size=16)
    q, _, w = operands(batch)
    assert agrees(batch, q, [torch.ones(800, 128)], w, 99).tolist() == [list(range(99))]


@pytest.mark.parametrize("what", ["keys", "queries", "weights"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 0.0, 1e-39, 1e-30, 1e18, 3e38])
def test_hostile_values(agrees: Choose, what: str, value: float) -> None:
    batch = paged_batch([600], [6], block_size=8)
    q, keys, w = operands(batch)
    target = {"keys": keys[0], "queries": q[3:].view(-1, 128), "weights": w[3:].view(-1, 1)}[what]
    rows = torch.rand(len(target)) < 0.1
    target[rows, torch.randint(0, target.shape[1], (int(rows.sum()),))] = value
    agrees(batch, q, keys, w, 64)
    target[torch.rand(target.shape) < 0.5] *= value
    agrees(batch, q, keys, w, 64)


@pytest.mark.parametrize("seed", range(4))
def test_magnitudes_far_apart(agrees: Choose, seed: int) -> None:
    torch.manual_seed(seed)
    batch = paged_batch([900], [8], block_size=8)
    q, keys, w = operands(batch)
    scale = [
        10 ** (torch.rand(size) * span - span / 2) for size, span in (((8, 32, 1), 50), ((900, 1), 60), ((8, 32), 70))
    ]
    agrees(batch, q * scale[0], [keys[0] * scale[1]], w * scale[2], 128)
    agrees(batch, q * scale[0][:, :1], [keys[0] * 1e-25], w * scale[2][:, :1], 128)


def test_the_largest_sums(agrees: Choose) -> None:
    """Rows of one magnitude along each other, and rows of a single element: as much as rounded products come to."""
    batch = paged_batch([400], [4], block_size=8)
    q, keys, w = operands(batch)
    q[0], q[1] = 1.0, -1.0
    q[2:] = 0
    q[2:, :, 5] = 3.0
    keys[0][:200] = keys[0][:200].sign()
    keys[0][50:150] = 1 - 2.0 ** -torch.arange(1.0, 101.0)[:, None]
    keys[0][300:, :] = 0
    keys[0][300:, 5] = torch.arange(100.0)
    for topk in (10, 50, 150):
        agrees(batch, q, keys, w.abs(), topk)


def test_missing_blocks(agrees: Choose) -> None:
    batch = paged_batch([600, 300], [4, 3], block_size=8)
    table = batch.block_table.clone()
    table[0, torch.randperm(75)[:20]] = -1
    table[1, :] = -1
    agrees(batch, *operands(batch), 100, table)


def test_keys_that_are_not_next_to_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = paged_batch([500], [2], block_size=8)
    q, keys, w = operands(batch)
    q, wide = q.bfloat16(), torch.randn(batch.num_blocks, 8, 3, 128).bfloat16()
    wide[:, :, 1] = batch.cache(keys)
    got = cpu.lightning_indexer(q, wide[:, :, 1], w, batch.paged, 77)
    monkeypatch.setattr(cpu, "WORDS", None)
    near = wide[:, :, 1].contiguous()
    assert torch.equal(got, cpu.lightning_indexer(q, near, w, batch.paged, 77))


@njit  # type: ignore[untyped-decorator]
def _scores(step: object, tokens: int, length: int, scores: object, pitch: int, slack: object) -> None:
    cpu_words._score(step, 0, 0, tokens, length, scores, pitch, slack)


@pytest.mark.parametrize("kind", ["random", "one element stands out", "same signs", "small"])
def test_scores_are_as_near_as_they_say(kind: str) -> None:
    batch = paged_batch([640], [4], block_size=16)
    q, keys, w = operands(batch)
    if kind == "one element stands out":
        q[..., 3] *= 100
        keys[0][:, 3] *= 100
    elif kind == "same signs":
        q, keys, w = q.abs(), [keys[0].abs()], w.abs()
    elif kind == "small":
        q, keys = q * 1e-9, [keys[0] * torch.logspace(-20, 0, 640)[:, None]]
    q, key = q.bfloat16(), keys[0].bfloat16()
    cache, visible = batch.cache([key]), np.full(4, 640)
    step = cpu._call(
        q, cache, w.numpy(), np.empty((0, 0), np.float32), visible, batch.block_table.long().numpy(),
        np.empty((4, 8), np.int32),
    )  # fmt: skip
    pitch = -(-640 // cpu_words.KEYS) * cpu_words.KEYS
    got, slack = np.empty((4, pitch), np.float32), np.empty(4, np.float32)
    _scores(step, 4, 640, got.reshape(-1), pitch, slack)
    dots = (q.double() @ key.double().T).relu()
    error = (torch.from_numpy(got[:, :640]) - (w.double()[..., None] * dots).sum(1)).abs().amax(1).numpy()
    assert (error <= slack / 2).all()
    assert (error > slack / 1000).all()  # nor does it say much more
