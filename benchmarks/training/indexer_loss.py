"""The Lightning Indexer's training loss: KL(attention || softmax of the index scores), in pieces.

    p[t, s] = mean over heads of softmax_s(q[t, h] . k[s, h] * scale)        detached
    I[t, s] = sum_j w[t, j] relu(q_I[t, j] . k_I[s])
    loss    = mean over t of  sum_s p[t, s] (log p[t, s] - log softmax_s(I)[t, s])

Both softmaxes run over the keys a query sees: all earlier tokens while the indexer warms up under dense attention, the
selected ones once attention is sparse. Source: DeepSeek-V3.2 report (arXiv 2512.02556), section 2.1.

The plain version holds [heads, T, T] probabilities and [index heads, T, T] dots, and autograd keeps them. This one
sweeps twice over tiles of queries and keys: once for the logarithms of both softmaxes' sums, once for the loss and for
its gradient, dLoss/dI = (softmax(I) - p) / queries, which it carries on to q_I, k_I and w while the tile is there.
Because the loss is a scalar, backward only has to multiply. Beside inputs and gradients a tile is all it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

MASKED = -1e30
QUERIES, KEYS = 128, 512  # size of a tile


class Attention(NamedTuple):
    """What the indexer has to imitate; no gradient flows there.

    q, k: [B, T, heads, D], rotated. scale: of the dot products.
    """

    q: Tensor
    k: Tensor
    scale: float


class Index(NamedTuple):
    """The indexer's side, with gradients: q [B, T, index heads, d], k [B, T, d], w [B, T, index heads], scaled."""

    q: Tensor
    k: Tensor
    w: Tensor


#: (queries, keys) -> bool [B, queries, keys]: what tensor query sees. Asked for one tile at a time.
Visible = Callable[[slice, slice], Tensor]


def seen_in(allowed: Tensor) -> Visible:
    """`Visible` of a mask bool [B, T, T]."""
    return lambda queries, keys: allowed[:, queries, keys]


def seen_in_texts(segments: Tensor) -> Visible:
    """`Visible` of dense attention: the same text and not later. segments: [B, T] int."""
    position = torch.arange(segments.shape[1], device=segments.device)

    def visible(queries: slice, keys: slice) -> Tensor:
        same = segments[:, queries, None] == segments[:, None, keys]
        return same & (position[keys] <= position[queries, None])

    return visible


def seen_if_chosen(selected: Tensor) -> Visible:
    """`Visible` of sparse attention: selected int [B, T, topk], positions of the keys; -1 for none."""

    def visible(queries: slice, keys: slice) -> Tensor:
        rows, width = selected[:, queries], keys.stop - keys.start
        inside = (rows >= keys.start) & (rows < keys.stop)
        columns = torch.where(inside, rows - keys.start, width).long()
        mask = torch.zeros(*rows.shape[:2], width + 1, dtype=torch.bool, device=rows.device)
        return mask.scatter_(-1, columns, True)[..., :-1]

    return visible


def indexer_loss(attention: Attention, index: Index, visible: Visible) -> Tensor:
    """The loss, a scalar in fp32 (fp64 for fp64 inputs). A query that sees nothing counts as 0.

    Memory: tiles of [B, heads, QUERIES, KEYS] for any number of tokens.
    """
    loss: Tensor = _Loss.apply(*(tensor.detach() for tensor in attention[:2]), attention.scale, visible, *index)  # type: ignore[no-untyped-call]
    return loss


def plain_indexer_loss(attention: Attention, index: Index, visible: Visible) -> Tensor:
    """The loss by autograd over whole [T, T] matrices, the reference of `indexer_loss`."""
    allowed = visible(slice(0, index.k.shape[1]), slice(0, index.k.shape[1]))
    with torch.no_grad():
        logits = _wide(torch.einsum("bqhd,bkhd->bhqk", attention.q, attention.k)) * attention.scale
        target = logits.masked_fill(~allowed[:, None], MASKED).softmax(-1).mean(1).masked_fill(~allowed, 0.0)
    dots = torch.einsum("bqhd,bkd->bqhk", index.q, index.k).relu()
    scores = _wide(torch.einsum("bqh,bqhk->bqk", index.w, dots))
    log_predicted = scores.masked_fill(~allowed, MASKED).log_softmax(-1)
    divergence = torch.special.xlogy(target, target) - (target * log_predicted).masked_fill(~allowed, 0.0)
    mean: Tensor = divergence.sum(-1).mean()
    return mean


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, scale: float, visible: Visible, *index: Tensor) -> Tensor:
        attention, learner = Attention(q, k, scale), Index(*index)
        grads = Index(*(torch.zeros_like(tensor, dtype=_wide(tensor).dtype) for tensor in index))
        loss = _wide(index[0]).new_zeros(())
        for queries in _pieces(q.shape[1], QUERIES):
            loss += _query_tiles(attention, learner, visible, queries, grads if any(ctx.needs_input_grad) else None)
        ctx.save_for_backward(*(grad.to(tensor.dtype) for grad, tensor in zip(grads, index, strict=True)))
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, None, None, *(grads[0].to(tensor.dtype) * tensor for tensor in ctx.saved_tensors))


def _query_tiles(attention: Attention, index: Index, visible: Visible, queries: slice, grads: Index | None) -> Tensor:
    """The share of some queries in the loss; adds their share of the gradients to `grads`."""
    batch, length, _, _ = attention.q.shape
    tiles = [(keys, mask) for keys in _pieces(length, KEYS) if (mask := visible(queries, keys)).any()]
    loss, share = _wide(index.q).new_zeros(()), 1.0 / (batch * length)
    if not tiles:
        return loss
    heads, learners = _Total(), _Total()
    for keys, mask in tiles:
        heads.add(_logits(attention, queries, keys, mask))
        learners.add(_scores(index, queries, keys, mask)[0])
    for keys, mask in tiles:
        target = (_logits(attention, queries, keys, mask) - heads.log()).exp_().mean(1).masked_fill_(~mask, 0.0)
        scores, dots = _scores(index, queries, keys, mask)
        log_predicted = (scores - learners.log()).masked_fill_(~mask, 0.0)
        loss += (torch.special.xlogy(target, target) - target * log_predicted).sum() * share
        if grads is not None:
            push = (log_predicted.exp_().masked_fill_(~mask, 0.0) - target).mul_(share).to(dots.dtype)  # dLoss/dI
            grads.w[:, queries] += torch.einsum("bqk,bqhk->bqh", push, dots)
            to_dots = dots.sign_().mul_(push.unsqueeze(2)).mul_(index.w[:, queries, :, None])
            grads.q[:, queries] += torch.einsum("bqhk,bkd->bqhd", to_dots, index.k[:, keys])
            grads.k[:, keys] += torch.einsum("bqhk,bqhd->bkd", to_dots, index.q[:, queries])
    return loss


class _Total:
    """log(sum(exp(x))) over the last dimension, tile by tile."""

    def __init__(self) -> None:
        self._log: Tensor | None = None

    def add(self, x: Tensor) -> None:
        new = x.logsumexp(-1, keepdim=True)
        self._log = new if self._log is None else torch.logaddexp(self._log, new)

    def log(self) -> Tensor:
        assert self._log is not None
        return self._log


def _logits(attention: Attention, queries: slice, keys: slice, mask: Tensor) -> Tensor:
    """[B, heads, queries, keys]"""
    dots = torch.einsum("bqhd,bkhd->bhqk", attention.q[:, queries], attention.k[:, keys])
    return (_wide(dots) * attention.scale).masked_fill_(~mask[:, None], MASKED)


def _scores(index: Index, queries: slice, keys: slice, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Index scores [B, queries, keys], and what the weights sum up: [B, queries, index heads, keys]."""
    dots = torch.einsum("bqhd,bkd->bqhk", index.q[:, queries], index.k[:, keys]).relu_()
    scores = _wide(torch.einsum("bqh,bqhk->bqk", index.w[:, queries], dots))
    return scores.masked_fill(~mask, MASKED), dots


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _pieces(length: int, size: int) -> Iterator[slice]:
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))
