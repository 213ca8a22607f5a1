"""GLM-5.3-Flash, scaled down, and what its training forward has beside GLM-5's: linear attention and residual streams.

The formulas are those of transformers' `Glm5NextText` modules and use their weights; a test compares both.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from glm5_ascend.demo_model.resources import DemoModel, data_folder

from .config import stop_ids

POOL = 4  # tokens behind one key of the indexer
CHUNK = 16  # exp of as many decays of -5 is far from the ends of fp32
#: Ids that no text of ours contains.
_IMAGE_TOKENS = {
    "image_token_id": "[MASK]", "video_token_id": "[sMASK]", "image_start_token_id": "<eop>",
    "image_end_token_id": "<eop>", "video_start_token_id": "<eop>", "video_end_token_id": "<eop>",
}  # fmt: skip


def flash_config(tokenizer: Any, **changes: Any) -> Any:
    """A `Glm5NextConfig` without an MTP layer and with the smallest of vision towers.

    Args:
        tokenizer: gives the ids of padding, stop and image tokens.
        changes: other values for single keys of the language model.
    """
    from transformers import Glm5NextConfig

    shipped = json.loads((data_folder(DemoModel.FLASH) / "config.json").read_text(encoding="utf-8"))
    shipped["text_config"] |= stop_ids(tokenizer) | changes
    images = {key: tokenizer.convert_tokens_to_ids(token) for key, token in _IMAGE_TOKENS.items()}
    config = Glm5NextConfig(**shipped | images)
    config.text_config._attn_implementation = "eager"
    return config


def no_rotation(hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Stand in for a rotary embedding where positions are not encoded: cos and sin [B, T, 0]."""
    nothing = hidden.new_zeros(*positions.shape, 0)
    return nothing, nothing


def entered(block: Any, half: str, hidden: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Input of one half of a block ("attn_hc" or "ffn_hc"), and the function that adds its output to the stream(s).

    Args:
        hidden: [B, T, hidden], or [B, T, streams, hidden] where a block has the weights of several streams.
    """
    if not hasattr(block, half):
        return hidden, hidden.add
    post, among, collapsed = getattr(block, half)(hidden)
    mixed = among.transpose(-1, -2) @ hidden
    return collapsed, lambda output: post.unsqueeze(-1) * output.unsqueeze(-2) + mixed


def linear_attention(layer: Any, hidden: Tensor, positions: Tensor) -> Tensor:
    """`Glm5NextTextLinearAttention` on packed rows: [B, T, hidden] -> same.

    Args:
        positions: [B, T], from 0 in every text.
    """
    batch, length, _ = hidden.shape
    mixed = torch.cat([layer.q_proj(hidden), layer.k_proj(hidden), layer.v_proj(hidden)], -1)
    kernel = layer.conv1d.weight[:, 0]  # [channels, taps], the token itself last
    convolved = mixed * kernel[:, -1]
    for back in range(1, kernel.shape[1]):
        earlier = F.pad(mixed, (0, 0, back, 0))[:, :length] * (positions >= back)[..., None]
        convolved = convolved + earlier * kernel[:, -1 - back]
    shape = (batch, length, layer.num_heads, layer.head_dim)
    q, k, v = (part.reshape(shape) for part in F.silu(convolved).float().chunk(3, -1))
    q, k = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + 1e-6) for part in (q, k))
    beta = torch.sigmoid(layer.b_proj(hidden).float())[..., None]
    decay = layer.forget_gate(hidden).float()
    with torch.autocast("cpu", enabled=False):  # products of decays need fp32
        q, k, v, decay, beta = (part.transpose(1, 2) for part in (q * layer.head_dim**-0.5, k, v, decay, beta))
        out = delta_rule(q, k, v, decay, beta, (positions == 0).cumsum(1)).transpose(1, 2)
    gate = layer.g_b_proj(layer.g_a_proj(hidden)).view(shape)
    output: Tensor = layer.o_proj(layer.o_norm(out, gate).reshape(batch, length, -1))
    return output


def delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, texts: Tensor) -> Tensor:
    """The gated delta rule in chunks, with an empty state at the beginning of every text.

    Args:
        q, k, v, decay: [B, heads, T, dim]. beta: [B, heads, T, 1]. texts: [B, T], number of the text of a token.
    """
    length = q.shape[2]
    after = -length % CHUNK
    q, k, v, decay, beta = (F.pad(part, (0, 0, 0, after)).unflatten(2, (-1, CHUNK)) for part in (q, k, v, decay, beta))
    texts = F.pad(texts, (0, after), value=-1).unflatten(1, (-1, CHUNK))[:, None]  # [B, 1, chunks, CHUNK]
    last = texts[..., -1:]
    carried = (texts == last.roll(1, 2))[..., None]  # tokens whose text began before the chunk
    same = texts[..., :, None] == texts[..., None, :]
    total = decay.cumsum(3)
    grown, shrunk, queries = k * (-total).exp(), k * total.exp(), q * total.exp()
    within = ((queries @ grown.mT) * same).tril()
    system = (beta * (shrunk @ grown.mT) * same).tril(-1) + torch.eye(CHUNK)
    right_side = torch.cat([beta * v, beta * shrunk * carried], -1)
    fresh, stored = torch.linalg.solve_triangular(system, right_side, upper=False, unitriangular=True).chunk(2, -1)
    queries = queries * carried
    ending = k * (total[..., -1:, :] - total).exp() * (texts == last)[..., None]
    survival = (total[..., -1:, :].exp() * (last == last.roll(1, 2))[..., None]).mT
    state, outputs = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]), []
    for n in range(q.shape[2]):
        new_values = fresh[:, :, n] - stored[:, :, n] @ state
        outputs.append(queries[:, :, n] @ state + within[:, :, n] @ new_values)
        state = state * survival[:, :, n] + ending[:, :, n].mT @ new_values
    return torch.cat(outputs, 2)[:, :, :length]
