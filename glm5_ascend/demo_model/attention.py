"""Multi-head latent attention with DSA, written once more with a gradient through the indexer's scores.

The formulas are those of transformers' `GlmMoeDsaAttention` and `GlmMoeDsaIndexer` and use their weights; a test
compares both. Two things are ours: rows may hold several packed texts, and the indexer can learn (transformers
computes its scores under `no_grad`).
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

Mode = Literal["dense", "warmup", "sparse"]
MASKED = -1e30
LEARNING_SHARE = 4  # with sparse attention the indexer learns on one row in so many: its gradient is dear


class Packed(NamedTuple):
    """Where every token of a packed batch stands, and what it may see."""

    positions: Tensor  # [B, T] int64, from 0 in every text
    allowed: Tensor  # [B, T, T] bool: same text and not later
    cos: Tensor  # [B, T, rope / 2]
    sin: Tensor  # [B, T, rope / 2]

    def rows(self, which: slice) -> Packed:
        """The same for some rows of the batch."""
        return Packed(*(each[which] for each in self))


def packed(rotary: Any, segments: Tensor, positions: Tensor) -> Packed:
    """Build the masks of a batch.

    Args:
        rotary: the model's `rotary_emb`.
        segments: [B, T] int, number of the text a token belongs to.
        positions: [B, T] int64, place inside the text.
    """
    length = segments.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    allowed = (segments[:, :, None] == segments[:, None, :]) & causal
    cos, sin = rotary(torch.zeros(1), positions)
    half = cos.shape[-1] // 2
    return Packed(positions, allowed, cos[..., :half].contiguous(), sin[..., :half].contiguous())


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Interleaved rotary embedding, [B, T, heads, rope] -> same shape; pairs (0, 1), (2, 3), ... turn together."""
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    return torch.cat((even * cos - odd * sin, odd * cos + even * sin), dim=-1)


def index_scores(indexer: Any, hidden: Tensor, q_resid: Tensor, place: Packed, late: Tensor | None = None) -> Tensor:
    """Scores of every token for Q queries (default all T): [B, T, hidden], [B, T, q_lora] -> [B, Q, T] float32."""
    batch, length, _ = hidden.shape
    rope = indexer.qk_rope_head_dim
    k = indexer.k_norm(indexer.wk(hidden)).unsqueeze(2)
    k = torch.cat((rotate(k[..., :rope], place.cos, place.sin), k[..., rope:]), dim=-1).squeeze(2)
    cos, sin = place.cos, place.sin
    if late is not None:
        hidden, q_resid, cos, sin = (each[:, late] for each in (hidden, q_resid, cos, sin))
    q = indexer.wq_b(q_resid).view(batch, -1, indexer.n_heads, indexer.head_dim)
    q = torch.cat((rotate(q[..., :rope], cos, sin), q[..., rope:]), dim=-1)
    dots = F.relu(torch.matmul(q.flatten(1, 2), k.transpose(1, 2)), inplace=True)  # [B, Q * heads, T]
    weights = indexer.weights_proj(hidden) * (indexer.n_heads**-0.5 * indexer.softmax_scale)
    summed = torch.matmul(weights.unsqueeze(2), dots.view(batch, -1, indexer.n_heads, length))
    scores: Tensor = summed.squeeze(2).float()
    return scores


@torch.no_grad()
def select(indexer: Any, hidden: Tensor, q_resid: Tensor, place: Packed) -> Tensor:
    """[B, T, T] bool: the `index_topk` best allowed tokens of every query (all of them where there are fewer).

    Queries that see no more than `index_topk` tokens need no scores: in rows of short chats most of them.
    """
    chosen = place.allowed.clone()
    for row, positions in enumerate(place.positions):
        late = (positions >= indexer.index_topk).nonzero().squeeze(1)
        if late.numel():
            scores = index_scores(
                indexer, hidden[row : row + 1], q_resid[row : row + 1], place.rows(slice(row, row + 1)), late
            )[0]
            allowed = place.allowed[row, late]
            best = scores.masked_fill(~allowed, MASKED).topk(indexer.index_topk, dim=-1).indices
            chosen[row, late] = torch.zeros_like(allowed).scatter(-1, best, True) & allowed
    return chosen


def divergence(target: Tensor, scores: Tensor, allowed: Tensor) -> Tensor:
    """Mean KL(target || softmax(scores)) over the queries; both restricted to `allowed`.

    Args:
        target: [B, H, T, T] attention probabilities; summed over heads and normalised here.
        scores: [B, T, T] index scores with gradient.
        allowed: [B, T, T] bool.
    """
    wanted = target.detach().float().sum(1)
    wanted = wanted / wanted.sum(-1, keepdim=True).clamp_min(1e-9)
    log_found = scores.masked_fill(~allowed, MASKED).log_softmax(-1)
    entropy = torch.special.xlogy(wanted, wanted).sum(-1)
    apart: Tensor = entropy - (wanted * log_found).masked_fill(~allowed, 0.0).sum(-1)
    return apart.mean()


def attend(layer: Any, hidden: Tensor, place: Packed, mode: Mode, learn: bool) -> tuple[Tensor, Tensor | None]:
    """Attention of one layer.

    Args:
        layer: a `GlmMoeDsaAttention`.
        hidden: [B, T, hidden], already normalised.
        place: masks and rotations.
        mode: "dense" ignores the indexer; "warmup" attends densely and trains the indexer on what it sees;
            "sparse" attends to the indexer's choice.
        learn: whether to return the indexer's divergence (its inputs are detached, as in the DSA recipe).

    Returns:
        output [B, T, hidden] and the divergence (scalar) or None.
    """
    batch, length, _ = hidden.shape
    heads, nope = layer.num_heads, layer.qk_nope_head_dim
    q_resid = layer.q_a_layernorm(layer.q_a_proj(hidden))
    q = layer.q_b_proj(q_resid).view(batch, length, heads, layer.qk_head_dim)
    latent, k_rope = layer.kv_a_proj_with_mqa(hidden).split([layer.kv_lora_rank, layer.qk_rope_head_dim], -1)
    kv = layer.kv_b_proj(layer.kv_a_layernorm(latent)).view(batch, length, heads, nope + layer.v_head_dim)
    k_rope = rotate(k_rope.unsqueeze(2), place.cos, place.sin).expand(-1, -1, heads, -1)
    q = torch.cat((q[..., :nope], rotate(q[..., nope:], place.cos, place.sin)), dim=-1)
    k = torch.cat((kv[..., :nope], k_rope.to(kv.dtype)), dim=-1)

    allowed = place.allowed
    seen, resid = hidden.detach(), q_resid.detach()
    if mode == "sparse":
        allowed = select(layer.indexer, seen, resid, place)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), kv[..., nope:].transpose(1, 2)
    padded = F.pad(v, (0, layer.qk_head_dim - layer.v_head_dim))  # equal widths take the fused kernel
    mixed = F.scaled_dot_product_attention(q, k, padded, allowed[:, None], scale=layer.scaling)[..., : layer.v_head_dim]
    output = layer.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
    if not learn or mode == "dense":
        return output, None
    pupils = batch if mode == "warmup" else max(1, batch // LEARNING_SHARE)
    with torch.no_grad():
        logits = torch.matmul(q[:pupils], k[:pupils].transpose(2, 3)).float() * layer.scaling
        probabilities = logits.masked_fill(~allowed[:pupils, None], MASKED).softmax(-1)
    scores = index_scores(layer.indexer, seen[:pupils], resid[:pupils], place.rows(slice(pupils)))
    return output, divergence(probabilities, scores, allowed[:pupils])
