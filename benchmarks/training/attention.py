"""Multi-head latent attention with DSA and a gradient through the indexer's scores.

The formulas are those of transformers' `GlmMoeDsaAttention` with its indexer, and use its weights; a test compares
them. Differences: rows may hold several packed texts, and the indexer can learn (transformers computes its scores under
`no_grad`).
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

Mode = Literal["dense", "warmup", "sparse"]
QUERIES = 128  # scored at a time
MASKED = -1e30
LEARNING_SHARE = 4  # with sparse attention the indexer learns on one row in this many: its gradient is expensive


class Packed(NamedTuple):
    """Positions and masks of a packed batch."""

    positions: Tensor  # [B, T] int64, from 0 in every text
    allowed: Tensor  # [B, T, T] bool: same text and not later
    cos: Tensor  # [B, T, rope / 2]
    sin: Tensor  # [B, T, rope / 2]

    def rows(self, which: slice) -> Packed:
        """The layout of some rows of the batch."""
        return Packed(*(tensor[which] for tensor in self))


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


def packed(rotary: Any, segments: Tensor, positions: Tensor) -> Packed:
    """Build the masks of a batch.

    Args:
        rotary: the model's `rotary_emb`.
        segments: [B, T] int, number of the text a token belongs to.
        positions: [B, T] int64, position inside the text.
    """
    length = segments.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    allowed = (segments[:, :, None] == segments[:, None, :]) & causal
    cos, sin = rotary(torch.zeros(1), positions)
    half = cos.shape[-1] // 2
    return Packed(positions, allowed, cos[..., :half].contiguous(), sin[..., :half].contiguous())


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Interleaved rotary embedding, [B, T, heads, rope] -> same shape; pairs (0, 1), (2, 3), ... are rotated."""
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    return torch.cat((even * cos - odd * sin, odd * cos + even * sin), dim=-1)


def index_parts(
    indexer: Any, hidden: Tensor, q_resid: Tensor, layout: Packed, queries: Tensor | slice = slice(None)
) -> Index:
    """Operands of the indexer's scores: [B, T, hidden], [B, T, q_lora] -> queries, keys and head weights.

    Args:
        queries: positions of the queries that are wanted; the keys are those of all tokens.
    """
    batch = hidden.shape[0]
    rope = indexer.qk_rope_head_dim
    k = indexer.k_norm(indexer.wk(hidden)).unsqueeze(2)
    k = torch.cat((rotate(k[..., :rope], layout.cos, layout.sin), k[..., rope:]), dim=-1).squeeze(2)
    q = indexer.wq_b(q_resid[:, queries]).view(batch, -1, indexer.n_heads, indexer.head_dim)
    q = torch.cat((rotate(q[..., :rope], layout.cos[:, queries], layout.sin[:, queries]), q[..., rope:]), dim=-1)
    return Index(q, k, indexer.weights_proj(hidden[:, queries]) * (indexer.n_heads**-0.5 * indexer.softmax_scale))


@torch.no_grad()
def select(indexer: Any, hidden: Tensor, q_resid: Tensor, layout: Packed) -> Tensor:
    """[B, T, T] bool: the `index_topk` best allowed tokens of every query (all of them where there are fewer).

    Queries that see no more than `index_topk` tokens need no scores: in rows of short chats most of them.
    """
    selected = layout.allowed.clone()
    parts = index_parts(indexer, hidden, q_resid, layout)
    for row, positions in enumerate(layout.positions):
        for late in (positions >= indexer.index_topk).nonzero().squeeze(1).split(QUERIES):
            queries, keys, weights = parts.q[row, late], parts.k[row], parts.w[row, late]
            dots = F.relu(queries @ keys.T, inplace=True)  # [queries, index heads, T]
            scores = (weights.unsqueeze(1) @ dots).squeeze(1).float()
            count = min(indexer.index_topk, scores.shape[-1])
            best = scores.masked_fill(~layout.allowed[row, late], MASKED).topk(count, dim=-1).indices
            selected[row, late] &= torch.zeros_like(selected[row, late]).scatter(-1, best, True)
    return selected


class Operands(NamedTuple):
    """Queries, keys and values [B, T, heads, D], rotated; q_resid: the latent of the queries [B, T, q_lora]."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_resid: Tensor


def operands(layer: Any, hidden: Tensor, layout: Packed) -> Operands:
    """The operands of a `GlmMoeDsaAttention` for normalised hidden states [B, T, hidden]."""
    batch, length, _ = hidden.shape
    heads, nope = layer.num_heads, layer.qk_nope_head_dim
    q_resid = layer.q_a_layernorm(layer.q_a_proj(hidden))
    q = layer.q_b_proj(q_resid).view(batch, length, heads, layer.qk_head_dim)
    latent, k_rope = layer.kv_a_proj_with_mqa(hidden).split([layer.kv_lora_rank, layer.qk_rope_head_dim], -1)
    kv = layer.kv_b_proj(layer.kv_a_layernorm(latent)).view(batch, length, heads, nope + layer.v_head_dim)
    k_rope = rotate(k_rope.unsqueeze(2), layout.cos, layout.sin).expand(-1, -1, heads, -1)
    q = torch.cat((q[..., :nope], rotate(q[..., nope:], layout.cos, layout.sin)), dim=-1)
    k = torch.cat((kv[..., :nope], k_rope.to(kv.dtype)), dim=-1)
    return Operands(q, k, kv[..., nope:], q_resid)


def attend(layer: Any, hidden: Tensor, layout: Packed, mode: Mode, learn: bool) -> tuple[Tensor, Tensor | None]:
    """Attention of one layer.

    Args:
        hidden: [B, T, hidden], already normalised.
        mode: "dense" ignores the indexer; "warmup" attends densely and trains the indexer on all visible keys;
            "sparse" attends to the indexer's selection.
        learn: whether to return the indexer's divergence (its inputs are detached, as in the DSA recipe).

    Returns:
        output [B, T, hidden] and the divergence (scalar) or None.
    """
    batch, length, _ = hidden.shape
    q, k, v, q_resid = operands(layer, hidden, layout)
    allowed = layout.allowed
    seen, resid = hidden.detach(), q_resid.detach()
    if mode == "sparse":
        allowed = select(layer.indexer, seen, resid, layout)
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    padded = F.pad(v, (0, layer.qk_head_dim - layer.v_head_dim))  # equal widths take the fused kernel
    mixed = F.scaled_dot_product_attention(q, k, padded, allowed[:, None], scale=layer.scaling)[..., : layer.v_head_dim]
    output = layer.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
    if not learn or mode == "dense":
        return output, None
    learners = batch if mode == "warmup" else max(1, batch // LEARNING_SHARE)
    parts = index_parts(layer.indexer, seen[:learners], resid[:learners], layout.rows(slice(learners)))
    target = Attention(q[:learners].transpose(1, 2), k[:learners].transpose(1, 2), layer.scaling)
    return output, indexer_loss(target, parts, allowed[:learners])


def indexer_loss(attention: Attention, index: Index, allowed: Tensor) -> Tensor:
    """KL(attention || softmax of the index scores), the Lightning Indexer's training loss: a scalar in fp32.

        p[t, s] = mean over heads of softmax_s(q[t, h] . k[s, h] * scale)        detached
        I[t, s] = sum_j w[t, j] relu(q_I[t, j] . k_I[s])
        loss    = mean over t of  sum_s p[t, s] (log p[t, s] - log softmax_s(I)[t, s])

    Both softmaxes run over `allowed`, bool [B, T, T], the keys a query sees: all earlier tokens while the indexer warms
    up under dense attention, the selected ones once attention is sparse. A query that sees nothing counts as 0.
    Memory: [B, heads, T, T] and [B, index heads, T, T]. Source: DeepSeek-V3.2 report (arXiv 2512.02556), section 2.1.
    """
    with torch.no_grad():
        logits = torch.einsum("bqhd,bkhd->bhqk", attention.q, attention.k).float() * attention.scale
        target = logits.masked_fill(~allowed[:, None], MASKED).softmax(-1).mean(1).masked_fill(~allowed, 0.0)
    dots = torch.einsum("bqhd,bkd->bqhk", index.q, index.k).relu()
    scores = torch.einsum("bqh,bqhk->bqk", index.w, dots).float()
    log_predicted = scores.masked_fill(~allowed, MASKED).log_softmax(-1)
    divergence = torch.special.xlogy(target, target) - (target * log_predicted).masked_fill(~allowed, 0.0)
    mean: Tensor = divergence.sum(-1).mean()
    return mean
