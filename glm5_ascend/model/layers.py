"""One decoder layer on one sequence, in fp32, for any implementation of `LayerWeights`.

Used to calibrate (float weights, inputs recorded) and to evaluate (integer weights). Every norm uses the config's
`rms_norm_eps`, as vLLM does; transformers 5.19 has 1e-6 in q_a/kv_a_layernorm. Source: transformers 5.19
`modeling_glm_moe_dsa.py`, vLLM 0.32 `deepseek_v2.py` (behaviour, not code).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from glm5_ascend.model import streams
from glm5_ascend.model.config import ModelConfig
from glm5_ascend.model.linear_attention import linear_attention
from glm5_ascend.model.memory import SCORES
from glm5_ascend.model.weights import LayerWeights as LayerWeights
from glm5_ascend.model.weights import rms_norm as rms_norm
from glm5_kernels import ops

INDEXER_NORM_EPS = 1e-6  # LayerNorm of the indexer key: fixed by the architecture, not in config.json


def rope_tables(config: ModelConfig, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos, sin [S, qk_rope_head_dim / 2]."""
    dim = config.qk_rope_head_dim
    frequency = config.rope_theta ** -(torch.arange(0, dim, 2, dtype=torch.float32, device=positions.device) / dim)
    angle = positions.float()[:, None] * frequency
    return angle.cos(), angle.sin()


def apply_rope(x: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotate interleaved pairs of x [S, heads, rope]; the output is de-interleaved, for q and k in the same way."""
    cos, sin = (t[:, None] for t in tables)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat([even * cos - odd * sin, odd * cos + even * sin], dim=-1)


@torch.no_grad()
def select_topk(
    config: ModelConfig, weights: LayerWeights, x: torch.Tensor, q_c: torch.Tensor, int8_keys: bool = False
) -> torch.Tensor:
    """Lightning Indexer on one sequence from position 0: bool [S, S], True where query t attends to key s.

    Args:
        int8_keys: queries and keys as an INT8 cache stores them (C8).
    """
    length = x.shape[0]
    if length <= config.index_topk:
        return torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
    q, k = _index_operands(config, weights, x, q_c)
    if int8_keys:
        q, k = ((values.float() * scale.float()[..., None]) for values, scale in map(ops.quantize_indexer, (q, k)))
    head_weight = weights.linear("self_attn.indexer.weights_proj", x)  # [S, index heads]
    pool = config.index_kpool
    selected = torch.zeros(length, length, dtype=torch.bool, device=x.device)
    for rows in _query_blocks(length):
        keys = k[: rows.stop // pool]
        score = torch.zeros(rows.stop - rows.start, len(keys), device=x.device)
        for head in range(config.index_n_heads):  # one head at a time: [t, S], never [heads, t, S]
            score += head_weight[rows, head, None] * torch.relu(q[rows, head] @ keys.T)
        complete = (torch.arange(rows.start, rows.stop, device=x.device) + 1) // pool  # pools that each query sees
        best = _best(score, complete, config.index_topk // pool)
        selected[rows, : len(keys) * pool] = best.repeat_interleave(pool, 1)
        # The tokens behind the last complete pool are always chosen.
        numbers = torch.arange(rows.stop, device=x.device)
        tail = (numbers >= complete[:, None] * pool).tril(rows.start)
        selected[rows, : rows.stop].logical_or_(tail)  # torch_npu has no bitwise_or_
    return selected


def count_common(a: torch.Tensor, b: torch.Tensor, rows: int = 256) -> int:
    """Count the keys that two selections bool [T, S] share; by blocks of rows, because torch sums in int64."""
    return sum(int((some & others).sum()) for some, others in zip(a.split(rows), b.split(rows), strict=True))


def _best(score: torch.Tensor, visible_keys: torch.Tensor, topk: int) -> torch.Tensor:
    """bool [t, K]: the `topk` largest scores among the `visible_keys` [t] first keys; of equal ones the first."""
    visible = torch.arange(score.shape[1], device=score.device) < visible_keys[:, None]
    score.masked_fill_(~visible, -torch.inf)
    last = score.topk(min(topk, score.shape[1]), dim=-1).values[:, -1:]
    above, level = score > last, score == last
    level &= level.cumsum(1) <= topk - above.sum(1, keepdim=True)
    return (above | level) & visible


def _index_operands(
    config: ModelConfig, weights: LayerWeights, x: torch.Tensor, q_c: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [S, index heads, D] and keys [S / index_kpool, D] of complete pools, rotated by position."""
    length, rope, prefix = x.shape[0], config.qk_rope_head_dim, "self_attn.indexer."
    tables = rope_tables(config, torch.arange(length, device=x.device))
    q = weights.linear(prefix + "wq_b", q_c).view(length, config.index_n_heads, config.index_head_dim)
    gain, bias = weights.vector(prefix + "k_norm.weight"), weights.vector(prefix + "k_norm.bias")
    k = F.layer_norm(weights.linear(prefix + "wk", x), (config.index_head_dim,), gain, bias, INDEXER_NORM_EPS)[:, None]
    q = torch.cat([apply_rope(q[..., :rope], tables), q[..., rope:]], dim=-1)
    k = torch.cat([apply_rope(k[..., :rope], tables), k[..., rope:]], dim=-1)[:, 0]
    return q, k if config.index_kpool == 1 else _pooled(config, weights, x, k)


def _pooled(config: ModelConfig, weights: LayerWeights, x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """One key [S / index_kpool, D] of each complete pool: the mean of its keys, weighted per channel by the gate."""
    prefix, pool, dim = "self_attn.indexer.index_kpool_compress_", config.index_kpool, k.shape[1]
    whole = len(k) // pool * pool
    gate = (x[:whole] @ weights.vector(prefix + "gate").T).view(-1, pool, dim)
    share = (gate + weights.vector(prefix + "ape")).softmax(1)
    return (share * k[:whole].view(-1, pool, dim)).sum(1)


def _query_blocks(length: int) -> Iterator[slice]:
    """Blocks of queries whose scores against all keys fit `SCORES`: one block up to 4096 tokens."""
    step = max(1, SCORES // length)
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def query_latent(config: ModelConfig, weights: LayerWeights, x: torch.Tensor) -> torch.Tensor:
    """Return the latent [S, q_lora_rank] that the queries of attention and indexer are projected from."""
    gain = weights.vector("self_attn.q_a_layernorm.weight")
    return rms_norm(weights.linear("self_attn.q_a_proj", x), gain, config.rms_norm_eps)


def attention(
    config: ModelConfig,
    weights: LayerWeights,
    x: torch.Tensor,
    shared: torch.Tensor | None,
    own_indexer: bool,
    int8_keys: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sparse MLA on one sequence x [S, hidden] (already normalised).

    Args:
        int8_keys: its own indexer's cache is INT8 (C8).
    Returns:
        output [S, hidden] and the selection [S, S] for later layers that share this indexer.
    """
    c, length = config, x.shape[0]
    tables = rope_tables(c, torch.arange(length, device=x.device))
    q_c = query_latent(c, weights, x)
    q = weights.linear("self_attn.q_b_proj", q_c).view(length, c.num_attention_heads, -1)
    q_nope, q_pe = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
    latent, k_pe = weights.linear("self_attn.kv_a_proj_with_mqa", x).split([c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)
    latent = rms_norm(latent, weights.vector("self_attn.kv_a_layernorm.weight"), c.rms_norm_eps)
    kv = weights.linear("self_attn.kv_b_proj", latent).view(length, c.num_attention_heads, -1)
    k_nope, v = kv.split([c.qk_nope_head_dim, c.v_head_dim], dim=-1)
    q_pe, k_pe = apply_rope(q_pe, tables), apply_rope(k_pe[:, None], tables)[:, 0]

    if own_indexer:
        selected = select_topk(c, weights, x, q_c, int8_keys)
    elif shared is None:
        raise ValueError("a shared-indexer layer has no full layer before it")
    else:
        selected = shared
    out = torch.empty(length, c.num_attention_heads, c.v_head_dim, device=x.device)
    heads = max(1, SCORES // length**2)  # without a fused kernel torch keeps [heads, S, S] scores
    for first in range(0, c.num_attention_heads, heads):
        group = slice(first, first + heads)
        shared_pe = k_pe[:, None].expand(-1, k_nope[:, group].shape[1], -1)
        query = torch.cat([q_nope[:, group], q_pe[:, group]], dim=-1).transpose(0, 1)
        key = torch.cat([k_nope[:, group], shared_pe], dim=-1).transpose(0, 1)
        value = v[None, :, group].transpose(1, 2)
        for rows in _query_blocks(length):
            end = rows.stop
            mixed = F.scaled_dot_product_attention(
                query[None, :, rows], key[None, :, :end], value[:, :, :end], selected[rows, :end]
            )
            out[rows, group] = mixed[0].transpose(0, 1)
    return weights.linear("self_attn.o_proj", out.flatten(1)), selected


def route(config: ModelConfig, weights: LayerWeights, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Router on x [T, hidden]: expert weights fp32 [T, top_k] and expert ids int64 [T, top_k]."""
    c = config
    score = torch.sigmoid(weights.linear("mlp.gate", x))
    choice = score + weights.vector("mlp.gate.e_score_correction_bias")
    if c.n_group > 1:
        groups = choice.view(len(x), c.n_group, -1)
        best = groups.topk(2, dim=-1).values.sum(-1).topk(c.topk_group, dim=-1).indices
        allowed = torch.zeros_like(choice[:, : c.n_group], dtype=torch.bool).scatter_(1, best, True)
        choice = groups.masked_fill(~allowed[..., None], -torch.inf).view(len(x), -1)
    ids = choice.topk(c.num_experts_per_tok, dim=-1).indices
    return expert_weights(c, score, ids), ids


def expert_weights(config: ModelConfig, score: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Weights fp32 [T, top_k] of the selected experts `ids`, from the router's scores [T, experts]."""
    weight = score.gather(1, ids)
    if config.norm_topk_prob:
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-20)
    return weight * config.routed_scaling_factor


def swiglu(config: ModelConfig, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, both clamped where the architecture has a limit: gate from above only."""
    limit = config.swiglu_limit
    if limit != math.inf:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return F.silu(gate) * up


def mlp(config: ModelConfig, weights: LayerWeights, prefix: str, x: torch.Tensor) -> torch.Tensor:
    """down_proj(swiglu(gate_proj(x), up_proj(x))) for the dense MLP, the shared expert or one routed expert."""
    gate, up = (weights.linear(f"{prefix}.{name}", x) for name in ("gate_proj", "up_proj"))
    return weights.linear(f"{prefix}.down_proj", swiglu(config, gate, up))


def attention_input(config: ModelConfig, weights: LayerWeights, hidden: torch.Tensor) -> torch.Tensor:
    """Normalise the residual stream [..., hidden] for attention."""
    return rms_norm(hidden, weights.vector("input_layernorm.weight"), config.rms_norm_eps)


def attention_block(
    config: ModelConfig,
    layer: int,
    weights: LayerWeights,
    hidden: torch.Tensor,
    shared: torch.Tensor | None = None,
    int8_keys: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run the first half of a layer on one sequence: add attention to the residual stream [S, stream_width].

    Args:
        shared: selection [S, S] of the layer whose indexer this one shares; unused where it has its own.
        int8_keys: its own indexer's cache is INT8 (C8).
    Returns:
        the stream after attention, and the selection for layers that share this one's indexer; linear attention
        passes `shared` on.
    """
    x, mixing = streams.entered(config, layer, weights, "attn", hidden)
    mixed, selected = mixed_tokens(config, layer, weights, attention_input(config, weights, x), shared, int8_keys)
    return streams.joined(mixing, hidden, mixed), selected


def mixed_tokens(
    config: ModelConfig,
    layer: int,
    weights: LayerWeights,
    x: torch.Tensor,
    shared: torch.Tensor | None = None,
    int8_keys: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return output [S, hidden] and selection of a layer's attention, sparse or linear, on normalised x [S, hidden]."""
    if config.attention_kind(layer) == "linear":
        return linear_attention(config, weights, x), shared
    return attention(config, weights, x, shared, config.has_indexer(layer), int8_keys)


def mlp_entry(
    config: ModelConfig, layer: int, weights: LayerWeights, hidden: torch.Tensor
) -> tuple[torch.Tensor, streams.Mixing | None]:
    """Return the normalised input [S, hidden] of a layer's second half, and how its output joins the streams."""
    x, mixing = streams.entered(config, layer, weights, "ffn", hidden)
    return rms_norm(x, weights.vector("post_attention_layernorm.weight"), config.rms_norm_eps), mixing


def unrouted_mlp(config: ModelConfig, layer: int, weights: LayerWeights, x: torch.Tensor) -> torch.Tensor:
    """Run the dense MLP, or the shared experts of a MoE layer, on x [T, hidden]."""
    return mlp(config, weights, "mlp.shared_experts" if config.is_moe(layer) else "mlp", x)


def mtp_input(
    config: ModelConfig, weights: LayerWeights, embedding: torch.Tensor, hidden: torch.Tensor
) -> torch.Tensor:
    """Return the MTP layer's input; position i is eh_proj(concat(enorm(embedding of token i+1), hnorm(hidden i))).

    `hidden` is the main model's output *after* its final norm; the embedding at position 0 is zeroed (vLLM 0.32).
    """
    embedding = torch.cat([torch.zeros_like(embedding[:1]), embedding[1:]])
    e = rms_norm(embedding, weights.vector("enorm.weight"), config.rms_norm_eps)
    h = rms_norm(hidden, weights.vector("hnorm.weight"), config.rms_norm_eps)
    return weights.linear("eh_proj", torch.cat([e, h], dim=-1))
