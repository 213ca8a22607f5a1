"""The Lightning Indexer's training loss: KL(attention || softmax of the index scores).

    p[t, s] = mean over heads of softmax_s(q[t, h] . k[s, h] * scale)        detached
    I[t, s] = sum_j w[t, j] relu(q_I[t, j] . k_I[s])
    loss    = mean over t of  sum_s p[t, s] (log p[t, s] - log softmax_s(I)[t, s])

Both softmaxes run over the keys a query sees: all earlier tokens while the indexer warms up under dense attention, the
selected ones once attention is sparse. Source: DeepSeek-V3.2 report (arXiv 2512.02556), section 2.1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MASKED = -1e30


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


def indexer_loss(attention: Attention, index: Index, allowed: Tensor, pool: int = 1) -> Tensor:
    """The loss, a scalar in fp32. allowed: bool [B, T, T], what each query sees; a query that sees nothing counts as 0.

    Memory: [B, heads, T, T] and [B, index heads, T, T]. pool: tokens behind one key of the indexer; the attention of
    complete pools is imitated.
    """
    with torch.no_grad():
        logits = torch.einsum("bqhd,bkhd->bhqk", attention.q, attention.k).float() * attention.scale
        target = logits.masked_fill(~allowed[:, None], MASKED).softmax(-1).mean(1).masked_fill(~allowed, 0.0)
        if pool > 1:
            allowed = allowed[..., pool - 1 :: pool]
            target = (
                target[..., : pool * allowed.shape[-1]].unflatten(-1, (-1, pool)).sum(-1).masked_fill(~allowed, 0.0)
            )
            target /= target.sum(-1, keepdim=True).clamp_min(1e-9)
    dots = torch.einsum("bqhd,bkd->bqhk", index.q, index.k).relu()
    scores = torch.einsum("bqh,bqhk->bqk", index.w, dots).float()
    log_predicted = scores.masked_fill(~allowed, MASKED).log_softmax(-1)
    divergence = torch.special.xlogy(target, target) - (target * log_predicted).masked_fill(~allowed, 0.0)
    mean: Tensor = divergence.sum(-1).mean()
    return mean
