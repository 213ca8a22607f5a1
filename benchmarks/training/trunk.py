"""The training forward of both models: transformers' modules and weights, packed rows, faster experts, and MTP."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .attention import Mode, Packed, attend
from .config import mtp_config
from .flash import entered, linear_attention

GROUP = 128
LOOK_BACK = ((1, 2), (1,))  # distances the first heads of layers 0 and 1 start with
LOCAL_PAIRS = 8  # rotary pairs quick enough to tell neighbours apart
SHARPNESS = 6.0  # a neighbour's logit lies about 3 below the wanted token's


def align_norm_eps(module: Any, eps: float) -> None:
    """Give every RMS norm the configured epsilon: transformers 5.19 builds two of them with 1e-6, vLLM does not."""
    for part in module.modules():
        if hasattr(part, "variance_epsilon"):
            part.variance_epsilon = eps


class MtpLayer(nn.Module):
    """Layer L of the checkpoint: predicts token i + 2 from the model's hidden state at i and token i + 1.

    Embedding and head are the model's own; the checkpoint holds copies.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import (
            GlmMoeDsaDecoderLayer,
            GlmMoeDsaRMSNorm,
        )

        size, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = GlmMoeDsaRMSNorm(size, eps)
        self.hnorm = GlmMoeDsaRMSNorm(size, eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.block = GlmMoeDsaDecoderLayer(mtp_config(config), config.num_hidden_layers)
        self.norm = GlmMoeDsaRMSNorm(size, eps)

    def forward(self, hidden: Tensor, following: Tensor, layout: Packed, mode: Mode, learn: bool) -> Any:
        """(normalised hidden states for the head [B, T, hidden], divergence or None).

        Args:
            hidden: [B, T, hidden], the model's states after its last norm.
            following: [B, T, hidden], embedding of the token after each; counted as 0 at position 0, as vLLM does.
            layout: masks and rotations of the tokens `hidden` belongs to.
            mode: attention mode.
            learn: whether to return the indexer's divergence.
        """
        following = following.masked_fill(layout.positions[..., None] == 0, 0.0)
        joined = self.eh_proj(torch.cat((self.enorm(following), self.hnorm(hidden)), dim=-1))
        states, apart = block_forward(self.block, joined, layout, mode, learn)
        return self.norm(states), apart


def experts_forward(moe: Any, hidden: Tensor) -> Tensor:
    """`GlmMoeDsaMoE` or `Glm5NextTextMoE`, tokens sorted by expert: [B, T, hidden] -> same; the load is in `moe.load`.

    Every expert's group is padded to a multiple of 128: oneDNN compiles a kernel for each new shape, and groups of
    arbitrary size made that the larger part of the time.
    """
    flat = hidden.reshape(-1, hidden.shape[-1])
    _, weights, selected = moe.gate(flat)
    picks = selected.shape[1]
    expert_of = selected.flatten()
    order = expert_of.argsort(stable=True)
    moe.load = torch.bincount(expert_of, minlength=moe.experts.num_experts)
    padded = (moe.load + GROUP - 1) // GROUP * GROUP
    shift = (padded.cumsum(0) - padded) - (moe.load.cumsum(0) - moe.load)
    slots = torch.arange(order.numel()) + shift[expert_of[order]]
    grouped = flat.new_zeros(int(padded.sum()), flat.shape[1]).index_copy(
        0, slots, flat.index_select(0, order // picks)
    )
    parts = []
    for expert, tokens in enumerate(grouped.split(padded.tolist())):
        gate, up = F.linear(tokens, moe.experts.gate_up_proj[expert]).chunk(2, dim=-1)
        if (limit := getattr(moe.experts, "swiglu_limit", None)) is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        parts.append(F.linear(F.silu(gate) * up, moe.experts.down_proj[expert]))
    back = torch.empty_like(slots)
    back[order] = slots
    restored = torch.cat(parts).index_select(0, back).view(-1, picks, flat.shape[1])
    routed = torch.matmul(weights.to(restored.dtype).unsqueeze(1), restored).squeeze(1)
    output: Tensor = routed.view_as(hidden) + moe.shared_experts(hidden)
    return output


def block_forward(block: Any, hidden: Tensor, layout: Packed, mode: Mode, learn: bool) -> tuple[Tensor, Any]:
    """One decoder layer: (output, divergence or None); `hidden` is [B, T, hidden], or [B, T, streams, hidden]."""
    inner, join = entered(block, "attn_hc", hidden)
    normed, apart = block.input_layernorm(inner), None
    if hasattr(block.self_attn, "forget_gate"):
        mixed = linear_attention(block.self_attn, normed, layout.positions)
    else:
        mixed, apart = attend(block.self_attn, normed, layout, mode, learn)
    inner, join = entered(block, "ffn_hc", join(mixed))
    normed = block.post_attention_layernorm(inner)
    sparse = hasattr(block.mlp, "experts")
    return join(experts_forward(block.mlp, normed) if sparse else block.mlp(normed)), apart


def text_model(model: Any) -> Any:
    """The part of a model with embedding, layers and last norm."""
    return getattr(model.model, "language_model", model.model)


def trunk_forward(model: Any, tokens: Tensor, layout: Packed, mode: Mode, learn: bool) -> tuple[Tensor, list[Tensor]]:
    """(states after the last norm [B, T, hidden], one divergence per layer if `learn`)."""
    text = text_model(model)
    apart: list[Tensor] = []
    hidden = text.embed_tokens(tokens)
    if streams := getattr(text.config, "hc_mult", 0):
        hidden = hidden.unsqueeze(2).repeat(1, 1, streams, 1)
    for block in text.layers:
        hidden, divergence = block_forward(block, hidden, layout, mode, learn)
        if divergence is not None:
            apart.append(divergence)
    return text.norm(hidden.mean(2) if streams else hidden), apart


def initialise(model: Any, mtp: MtpLayer | None, seed: int) -> None:
    """Fresh weights: N(0, 1 / fan_in), residual outputs smaller, the head nearly zero."""
    generator = torch.Generator().manual_seed(seed)
    text = text_model(model)
    depth = len(text.layers)
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *(mtp.named_parameters() if mtp else ())]:
            if weight.ndim < 2:
                continue
            std = weight.shape[-1] ** -0.5
            if "o_proj" in name or "down_proj" in name:
                std *= (2 * depth) ** -0.5
            elif "embed_tokens" in name:
                std = 0.5
            elif "lm_head" in name or "gate.weight" in name:
                std = 0.02
            weight.copy_(torch.randn(weight.shape, generator=generator) * std)
    if hasattr(text, "rotary_emb"):
        plant_positional_heads(model, generator)


def plant_positional_heads(model: Any, generator: torch.Generator) -> None:
    """Start two heads of layer 0 and one of layer 1 as "look one (two) tokens back".

    Copying needs such heads, and there are no biases to build them from: a text carries no constant until the
    embeddings grow a common direction. Starting with that direction and with these heads saves most of the search;
    from then on they are weights like all others.
    """
    config, weights = model.config, model.model
    common = torch.randn(config.hidden_size, generator=generator)
    common /= common.norm()
    with torch.no_grad():
        weights.embed_tokens.weight += 0.29 * config.hidden_size**0.5 * common
        after_norm = 0.5 * config.hidden_size**0.5  # size of the common part behind the first norm
        frequencies = weights.rotary_emb.inv_freq[:LOCAL_PAIRS]
        rope, resid = config.qk_rope_head_dim, config.q_lora_rank
        for number, offsets in enumerate(LOOK_BACK[: len(weights.layers)]):
            layer = weights.layers[number].self_attn
            key = torch.zeros(rope)
            key[0 : 2 * LOCAL_PAIRS : 2] = SHARPNESS
            layer.kv_a_proj_with_mqa.weight[-rope:] *= 0.3
            layer.kv_a_proj_with_mqa.weight[-rope:] += torch.outer(key, common) / after_norm
            carrier = torch.zeros(resid)
            carrier[0] = 1.0
            layer.q_a_proj.weight += torch.outer(carrier, common) * resid**0.5 / after_norm
            query_rows = layer.q_b_proj.weight.view(layer.num_heads, layer.qk_head_dim, resid)[:, -rope:]
            for head, offset in enumerate(offsets):
                query = torch.zeros(rope)
                query[0 : 2 * LOCAL_PAIRS : 2] = torch.cos(offset * frequencies)
                query[1 : 2 * LOCAL_PAIRS : 2] = -torch.sin(offset * frequencies)
                query_rows[head] *= 0.3
                query_rows[head] += torch.outer(SHARPNESS * query, carrier) / (resid / 2) ** 0.5
