"""The training forward: transformers' modules and weights, packed rows, and MTP."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .attention import Mode, Packed, attend

LOOK_BACK = ((1, 2), (1,))  # distances the first heads of layers 0 and 1 start with
LOCAL_PAIRS = 8  # rotary pairs quick enough to tell neighbours apart
SHARPNESS = 6.0  # a neighbour's logit lies about 3 below the wanted token's


def align_norm_eps(module: Any, eps: float) -> None:
    """Give every RMS norm the configured epsilon: transformers 5.19 builds two of them with 1e-6, vLLM does not."""
    for part in module.modules():
        if hasattr(part, "variance_epsilon"):
            part.variance_epsilon = eps


def mtp_config(config: Any) -> Any:
    """Add one layer to a config, so that transformers' decoder layer class can build layer L."""
    values = config.to_dict()
    values["num_hidden_layers"] += 1
    for key, kind in (("mlp_layer_types", "sparse"), ("indexer_types", "full")):
        values[key] = [*values[key], kind]
    values["layer_types"] = None
    extended = type(config)(**values)
    extended._attn_implementation = "eager"
    return extended


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
            layout: of the tokens `hidden` belongs to.
        """
        following = following.masked_fill(layout.positions[..., None] == 0, 0.0)
        joined = self.eh_proj(torch.cat((self.enorm(following), self.hnorm(hidden)), dim=-1))
        states, apart = block_forward(self.block, joined, layout, mode, learn)
        return self.norm(states), apart


def count_loads(model: Any, mtp: MtpLayer) -> None:
    """Let every router keep the tokens of its last call per expert, [experts], as `load`."""

    def count(router: Any, _: Any, output: tuple[Tensor, ...]) -> None:
        router.load = torch.bincount(output[-1].flatten(), minlength=router.num_experts)

    for block in [*model.model.layers, mtp.block]:
        if hasattr(block.mlp, "gate"):
            block.mlp.gate.register_forward_hook(count)


def block_forward(block: Any, hidden: Tensor, layout: Packed, mode: Mode, learn: bool) -> tuple[Tensor, Any]:
    """One decoder layer, [B, T, hidden] -> the same; and the divergence, or None."""
    mixed, apart = attend(block.self_attn, block.input_layernorm(hidden), layout, mode, learn)
    hidden = hidden + mixed
    return hidden + block.mlp(block.post_attention_layernorm(hidden)), apart


def trunk_forward(model: Any, tokens: Tensor, layout: Packed, mode: Mode, learn: bool) -> tuple[Tensor, list[Tensor]]:
    """(states after the last norm [B, T, hidden], one divergence per layer if `learn`)."""
    apart: list[Tensor] = []
    hidden = model.model.embed_tokens(tokens)
    for block in model.model.layers:
        hidden, divergence = block_forward(block, hidden, layout, mode, learn)
        if divergence is not None:
            apart.append(divergence)
    return model.model.norm(hidden), apart


def initialise(model: Any, mtp: MtpLayer, seed: int) -> None:
    """Fresh weights: N(0, 1 / fan_in), residual outputs smaller, the head nearly zero."""
    generator = torch.Generator().manual_seed(seed)
    depth = len(model.model.layers)
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *mtp.named_parameters()]:
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
