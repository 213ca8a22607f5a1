"""Log-probabilities without logits: one pass over blocks of the vocabulary, sums kept per token.

A softmax over a vocabulary that comes in blocks needs a running maximum and a running sum (Milakov and Gimelshein,
arXiv 1805.02867); the divergence of two of them needs one sum more: with p = softmax(a) and q = softmax(b),
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
        wanted: int64 [T, K], ids whose logits to keep.
    Attributes:
        best: int64 [T], id of the largest logit, the first of equal ones.
        logits: fp32 [T, K].
    """

    def __init__(self, wanted: torch.Tensor) -> None:
        tokens = len(wanted)
        self.wanted = wanted
        self.logits = torch.full(wanted.shape, torch.nan)
        self.best = torch.zeros(tokens, dtype=torch.int64)
        self._most = torch.full((tokens,), -torch.inf)
        self._sum = torch.zeros(tokens, dtype=torch.float64)

    def add(self, rows: slice, start: int, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the logits [n, V] of ids `start` on for the tokens `rows`.

        Returns:
            exp(logits - most), fp32 [n, V], and the factor fp64 [n] that brings older sums to the same `most`.
        """
        most, at = logits.max(dim=1)
        before = self._most[rows]
        self.best[rows] = torch.where(most > before, at + start, self.best[rows])
        most = torch.maximum(most, before)
        weight = torch.exp(logits - most[:, None])
        factor = torch.exp((before - most).double())
        self._sum[rows] = self._sum[rows] * factor + weight.sum(1, dtype=torch.float64)
        self._most[rows] = most
        place = self.wanted[rows] - start
        here = (place >= 0) & (place < logits.shape[1])
        kept = logits.gather(1, place.clamp(0, logits.shape[1] - 1))
        self.logits[rows] = torch.where(here, kept, self.logits[rows])
        return weight, factor

    @property
    def sums(self) -> torch.Tensor:
        return self._sum

    @property
    def log_sum(self) -> torch.Tensor:
        """log sum exp of each token's logits, fp64 [T]."""
        return self._most.double() + self._sum.log()

    @property
    def log_probabilities(self) -> torch.Tensor:
        """fp64 [T, K] of the wanted ids."""
        return self.logits.double() - self.log_sum[:, None]


def _rows(count: int) -> Iterator[slice]:
    for start in range(0, count, ROWS):
        yield slice(start, min(start + ROWS, count))


def softmax_of(model: StoredModel, normed: torch.Tensor, wanted: torch.Tensor, mtp: int | None = None) -> Softmax:
    """The softmax of one model's tokens.

    Args:
        normed: fp32 [T, hidden], behind the final norm. wanted: int64 [T, K]. mtp: by the head of this MTP layer.
    """
    found = Softmax(wanted)
    for start, head in model.head(mtp):
        for rows in _rows(len(normed)):
            found.add(rows, start, normed[rows] @ head.T)
    return found


def divergence(
    models: tuple[StoredModel, StoredModel], normed: tuple[torch.Tensor, torch.Tensor], wanted: torch.Tensor
) -> tuple[torch.Tensor, Softmax, Softmax]:
    """KL(first || second) in nats, fp64 [T], and both softmaxes; arguments as for `softmax_of`."""
    first, second = Softmax(wanted), Softmax(wanted)
    mixed = torch.zeros(len(wanted), dtype=torch.float64)
    for (start, head_a), (_, head_b) in zip(models[0].head(), models[1].head(), strict=True):
        for rows in _rows(len(wanted)):
            a, b = normed[0][rows] @ head_a.T, normed[1][rows] @ head_b.T
            weight, factor = first.add(rows, start, a)
            second.add(rows, start, b)
            mixed[rows] = mixed[rows] * factor + (weight * (a - b)).sum(1, dtype=torch.float64)
    kl = mixed / first.sums - first.log_sum + second.log_sum
    return torch.where(kl < 0, 0.0, kl), first, second  # below zero is rounding; NaN stays
