"""Log-probabilities without logits: one pass over blocks of the vocabulary with running sums per token.

A softmax over a vocabulary that comes in blocks needs a running maximum and a running sum (Milakov and Gimelshein,
arXiv 1805.02867). The divergence of two of them needs one more sum: with p = softmax(a) and q = softmax(b),
KL(p || q) = sum p (a - b) - lse(a) + lse(b).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from glm5_ascend.checkpoint.workers import Workers, in_order
from glm5_ascend.fidelity.evaluation.stored_model import StoredModel
from glm5_ascend.model.weights import fp32_linear

#: Tokens whose logits over one block of the vocabulary are in memory at a time, in each thread.
ROWS = 1024


class BlockSums(NamedTuple):
    """Of T tokens, over one block of the vocabulary.

    Attributes:
        max, best: largest logit fp32 [T], and its id int64 [T]. sum: fp64 [T], sum of exp(logit - max).
        logits: fp32 [T, K] of the ids of interest; NaN for those of other blocks.
    """

    max: torch.Tensor
    best: torch.Tensor
    sum: torch.Tensor
    logits: torch.Tensor


class Softmax:
    """Running softmax of each of T tokens; sums in fp64.

    Args:
        ids: int64 [T, K], ids whose logits are recorded.
    Attributes:
        best: int64 [T], id of the largest logit, the first of equal ones.
        logits: fp32 [T, K].
        sum: fp64 [T], sum of exp(logit - maximum).
    """

    def __init__(self, ids: torch.Tensor) -> None:
        tokens = len(ids)
        self.logits = torch.full(ids.shape, torch.nan)
        self.best = torch.zeros(tokens, dtype=torch.int64)
        self.sum = torch.zeros(tokens, dtype=torch.float64)
        self._max = torch.full((tokens,), -torch.inf)

    def add(self, block: BlockSums) -> tuple[torch.Tensor, torch.Tensor]:
        """Add a block behind those before it; returns the factors fp64 [T] of older sums and of the block's."""
        self.best = torch.where(block.max > self._max, block.best, self.best)
        largest = torch.maximum(block.max, self._max)
        older, newer = ((values - largest).double().exp() for values in (self._max, block.max))
        self.sum = self.sum * older + block.sum * newer
        self.logits = torch.where(block.logits.isnan(), self.logits, block.logits)
        self._max = largest
        return older, newer

    @property
    def log_sum(self) -> torch.Tensor:
        """log sum exp of each token's logits, fp64 [T]."""
        return self._max.double() + self.sum.log()

    @property
    def log_probabilities(self) -> torch.Tensor:
        """Log-probabilities of `ids`, fp64 [T, K]."""
        return self.logits.double() - self.log_sum[:, None]


def _block_sums(logits: torch.Tensor, ids: torch.Tensor, start: int) -> tuple[BlockSums, torch.Tensor]:
    """Sums of the logits [n, V] of ids `start` to `start` + V, and exp(logits - their maximum)."""
    largest, argmax = logits.max(dim=1)
    weight = torch.exp(logits - largest[:, None])
    column = ids - start
    gathered = logits.gather(1, column.clamp(0, logits.shape[1] - 1))
    of_ids = torch.where((column >= 0) & (column < logits.shape[1]), gathered, torch.nan)
    return BlockSums(largest, argmax + start, weight.sum(1, dtype=torch.float64), of_ids), weight


def softmax_of(
    model: StoredModel, normed: torch.Tensor, ids: torch.Tensor, workers: Workers | None, mtp: int | None = None
) -> Softmax:
    """The softmax of one model's tokens.

    Args:
        normed: fp32 [T, hidden], output of the final norm. ids: int64 [T, K]. mtp: use the head of this MTP layer.
    """
    softmax = Softmax(ids)

    def block_sums(rows: tuple[int, int]) -> BlockSums:
        head = model.head(*rows, mtp)
        pieces = zip(normed.split(ROWS), ids.split(ROWS), strict=True)
        return _joined([_block_sums(fp32_linear(x, head), of_ids, rows[0])[0] for x, of_ids in pieces])

    for block in in_order(workers, block_sums, model.head_blocks()):
        softmax.add(block)
    return softmax


def _joined(pieces: list[BlockSums]) -> BlockSums:
    return BlockSums(*(torch.cat(values) for values in zip(*pieces, strict=True)))


def divergence(
    models: tuple[StoredModel, StoredModel],
    normed: tuple[torch.Tensor, torch.Tensor],
    ids: torch.Tensor,
    workers: Workers,
) -> tuple[torch.Tensor, Softmax, Softmax]:
    """KL(first || second) in nats, fp64 [T], and both softmaxes; arguments as for `softmax_of`."""
    first, second = Softmax(ids), Softmax(ids)
    cross = torch.zeros(len(ids), dtype=torch.float64)

    def block_sums(rows: tuple[int, int]) -> tuple[BlockSums, BlockSums, torch.Tensor]:
        heads = [model.head(*rows) for model in models]
        sums, others, crosses = [], [], []
        for x, y, of_ids in zip(normed[0].split(ROWS), normed[1].split(ROWS), ids.split(ROWS), strict=True):
            a, b = fp32_linear(x, heads[0]), fp32_linear(y, heads[1])
            newer, weight = _block_sums(a, of_ids, rows[0])
            sums.append(newer)
            others.append(_block_sums(b, of_ids, rows[0])[0])
            crosses.append((weight * (a - b)).sum(1, dtype=torch.float64))
        return _joined(sums), _joined(others), torch.cat(crosses)

    for block, other, added in workers.map(block_sums, models[0].head_blocks()):
        older, newer = first.add(block)
        second.add(other)
        cross = cross * older + added * newer
    kl = cross / first.sum - first.log_sum + second.log_sum
    return torch.where(kl < 0, 0.0, kl), first, second  # below zero is rounding; NaN stays
