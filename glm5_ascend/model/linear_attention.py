"""Kimi Delta Attention (KDA) on one sequence, in fp32: the linear attention of GLM-5.3-Flash.

A head keeps a state S [key, value] that decays per key channel and learns by the delta rule:
S <- diag(exp(g)) S; S <- S + beta k (v - S^T k)^T; output S^T q. Source: transformers 5.19 `modeling_glm5_next.py`
(behaviour, not code); computed in chunks as in the paper (arXiv 2510.26692).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from glm5_ascend.model.config import ModelConfig
from glm5_ascend.model.weights import LayerWeights, rms_norm

_PREFIX = "self_attn."
#: Of the squared length of a query or key, before the root.
_LENGTH_EPS = 1e-6
#: Decays inside a chunk are products exp(g_i) * exp(-g_j): exp of this is far from the ends of fp32.
_LARGEST_EXPONENT = 80.0
_LARGEST_CHUNK = 64


def linear_attention(config: ModelConfig, weights: LayerWeights, x: torch.Tensor) -> torch.Tensor:
    """KDA on one sequence x [S, hidden], already normalised, from position 0: [S, hidden]."""
    heads = len(x), config.linear_num_heads, config.linear_head_dim
    q, k, v = (_convolved(weights, side, x).view(heads) for side in "qkv")
    q = _unit(q) * config.linear_head_dim**-0.5
    beta = torch.sigmoid(weights.linear(_PREFIX + "b_proj", x))
    out = delta_rule(q, _unit(k), v, _log_decay(config, weights, x), beta, config.linear_lower_bound)
    gate = weights.linear(_PREFIX + "g_b_proj", weights.linear(_PREFIX + "g_a_proj", x)).view(heads)
    out = rms_norm(out, weights.vector(_PREFIX + "o_norm.weight"), config.rms_norm_eps) * torch.sigmoid(gate)
    return weights.linear(_PREFIX + "o_proj", out.flatten(1))


def _convolved(weights: LayerWeights, side: str, x: torch.Tensor) -> torch.Tensor:
    """Queries, keys or values [S, heads * dim] after their causal convolution over the last tokens, and SiLU."""
    kernel = weights.vector(f"{_PREFIX}{side}_conv1d.weight")  # [heads * dim, 1, tokens]
    columns = weights.linear(f"{_PREFIX}{side}_proj", x).T[None]
    padded = F.pad(columns, (kernel.shape[-1] - 1, 0))
    return F.silu(F.conv1d(padded, kernel, groups=len(kernel)))[0].T


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _LENGTH_EPS)


def _log_decay(config: ModelConfig, weights: LayerWeights, x: torch.Tensor) -> torch.Tensor:
    """Logarithm of the decay, fp32 [S, heads, dim], between `linear_lower_bound` and 0."""
    raw = weights.linear(_PREFIX + "f_b_proj", weights.linear(_PREFIX + "f_a_proj", x))
    raw = (raw + weights.vector(_PREFIX + "dt_bias")).view(len(x), config.linear_num_heads, -1)
    rate = weights.vector(_PREFIX + "A_log").exp()
    return config.linear_lower_bound * torch.sigmoid(rate[:, None] * raw)


def delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, lower_bound: float
) -> torch.Tensor:
    """Outputs [S, heads, dim] of the gated delta rule from an empty state; q, k, v, g [S, heads, dim], beta [S, heads].

    Args:
        g: logarithm of the decay of each key channel, >= `lower_bound`.
    """
    size = max(1, min(_LARGEST_CHUNK, int(_LARGEST_EXPONENT / max(-lower_bound, 1e-3))))
    state = torch.zeros(q.shape[1], q.shape[2], v.shape[2], device=q.device)
    out = torch.empty_like(v)
    for start in range(0, len(q), size):
        span = slice(start, start + size)
        heads_first = _Chunk(*(x[span].transpose(0, 1) for x in (q, k, v, g, beta[..., None])))
        answer, state = _chunk(heads_first, state)
        out[span] = answer.transpose(0, 1)
    return out


class _Chunk(NamedTuple):
    """Queries, keys, values, log decay [heads, tokens, dim] and beta [heads, tokens, 1]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor


def _chunk(chunk: _Chunk, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One chunk [heads, tokens, dim] after `state` [heads, dim, dim]: outputs and the state behind it.

    With G the sum of g up to a token, token i reads what token j wrote times exp(G_i - G_j).
    """
    q, k, v, g, beta = chunk
    total = g.cumsum(1)
    grown, shrunk = k * (-total).exp(), k * total.exp()
    queries = q * total.exp()
    mixing = (beta * (shrunk @ grown.transpose(1, 2))).tril(-1)  # what earlier tokens of the chunk have stored
    targets = beta * (v - shrunk @ state)
    written = torch.linalg.solve_triangular(
        mixing + torch.eye(len(mixing[0]), device=q.device), targets, upper=False, unitriangular=True
    )
    out = queries @ state + (queries @ grown.transpose(1, 2)).tril() @ written
    last = total[:, -1:]
    decayed = state * last.exp().transpose(1, 2) + (k * (last - total).exp()).transpose(1, 2) @ written
    return out, decayed
