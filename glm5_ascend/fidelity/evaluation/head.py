"""Log-probabilities without logits: one pass over blocks of the vocabulary with running sums per token.

A softmax over a vocabulary that comes in blocks needs a running maximum and a running sum (Milakov and Gimelshein,
arXiv 1805.02867). The divergence of two of them needs one more sum: with p = softmax(a) and q = softmax(b),
KL(p || q) = sum p (a - b) - lse(a) + lse(b).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from glm5_ascend.fidelity.evaluation.stored_model import StoredModel

#: Tokens whose logits over one block of the vocabulary are in memory at a time.
ROWS = 1024


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
        self.ids = ids
        self.logits = torch.full(ids.shape, torch.nan)
        self.best = torch.zeros(tokens, dtype=torch.int64)
        self.sum = torch.zeros(tokens, dtype=torch.float64)
        self._max = torch.full((tokens,), -torch.inf)

    def add(self, rows: slice, start: int, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the logits [n, V] of ids `start` to `start` + V for the tokens `rows`.

        Returns:
            exp(logits - maximum), fp32 [n, V], and the factor fp64 [n] that scales older sums to the same maximum.
        """
        block_max, argmax = logits.max(dim=1)
        old_max = self._max[rows]
        self.best[rows] = torch.where(block_max > old_max, argmax + start, self.best[rows])
        new_max = torch.maximum(block_max, old_max)
        weight = torch.exp(logits - new_max[:, None])
        factor = torch.exp((old_max - new_max).double())
        self.sum[rows] = self.sum[rows] * factor + weight.sum(1, dtype=torch.float64)
        self._max[rows] = new_max
        column = self.ids[rows] - start
        in_block = (column >= 0) & (column < logits.shape[1])
        gathered = logits.gather(1, column.clamp(0, logits.shape[1] - 1))
        self.logits[rows] = torch.where(in_block, gathered, self.logits[rows])
        return weight, factor

    @property
    def log_sum(self) -> torch.Tensor:
        """log sum exp of each token's logits, fp64 [T]."""
        return self._max.double() + self.sum.log()

    @property
    def log_probabilities(self) -> torch.Tensor:
        """Log-probabilities of `ids`, fp64 [T, K]."""
        return self.logits.double() - self.log_sum[:, None]


def _row_blocks(count: int) -> Iterator[slice]:
    for start in range(0, count, ROWS):
        yield slice(start, min(start + ROWS, count))


def softmax_of(model: StoredModel, normed: torch.Tensor, ids: torch.Tensor, mtp: int | None = None) -> Softmax:
    """The softmax of one model's tokens.

    Args:
        normed: fp32 [T, hidden], output of the final norm. ids: int64 [T, K]. mtp: use the head of this MTP layer.
    """
    softmax = Softmax(ids)
    for start, head in model.head(mtp):
        for rows in _row_blocks(len(normed)):
            softmax.add(rows, start, normed[rows] @ head.T)
    return softmax


def divergence(
    models: tuple[StoredModel, StoredModel], normed: tuple[torch.Tensor, torch.Tensor], ids: torch.Tensor
) -> tuple[torch.Tensor, Softmax, Softmax]:
    """KL(first || second) in nats, fp64 [T], and both softmaxes; arguments as for `softmax_of`."""
    first, second = Softmax(ids), Softmax(ids)
    cross = torch.zeros(len(ids), dtype=torch.float64)
    for (start, head_a), (_, head_b) in zip(models[0].head(), models[1].head(), strict=True):
        for rows in _row_blocks(len(ids)):
            a, b = normed[0][rows] @ head_a.T, normed[1][rows] @ head_b.T
            weight, factor = first.add(rows, start, a)
            second.add(rows, start, b)
            cross[rows] = cross[rows] * factor + (weight * (a - b)).sum(1, dtype=torch.float64)
    kl = cross / first.sum - first.log_sum + second.log_sum
    return torch.where(kl < 0, 0.0, kl), first, second  # below zero is rounding; NaN stays
