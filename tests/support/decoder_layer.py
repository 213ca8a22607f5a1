"""A whole layer on one sequence, both halves at once: what the layer-by-layer passes are compared with."""

from __future__ import annotations

from collections.abc import Callable

import torch

from glm5_ascend.model import layers, streams
from glm5_ascend.model.config import ModelConfig


def decoder_layer(
    config: ModelConfig,
    layer: int,
    weights: layers.LayerWeights,
    hidden: torch.Tensor,
    shared: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden [S, hidden] -> (hidden, selection)."""
    hidden, selected = layers.attention_block(config, layer, weights, hidden, shared)
    return mlp_block(config, layer, weights, hidden), selected


class Weights:
    """A layer's weights in floats, by their names in the layer."""

    def __init__(self, read: Callable[[str], torch.Tensor]) -> None:
        self.vector = read

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ self.vector(f"{name}.weight").T


def main_logits(
    config: ModelConfig,
    read: Callable[[str], torch.Tensor],
    weights: Callable[[int], layers.LayerWeights],
    ids: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one sequence: what the MTP layer reads, and logits."""
    hidden, shared = read("model.embed_tokens.weight").float()[ids], None
    for layer in range(config.num_hidden_layers):
        hidden, shared = decoder_layer(config, layer, weights(layer), hidden, shared)
    normed = layers.rms_norm(hidden, read("model.norm.weight").float(), config.rms_norm_eps)
    return normed, normed @ read("lm_head.weight").float().T


def mtp_logits(
    config: ModelConfig, weights: layers.LayerWeights, embedded: torch.Tensor, previous: torch.Tensor
) -> torch.Tensor:
    x = layers.mtp_input(config, weights, embedded, previous)
    x, _ = decoder_layer(config, config.num_hidden_layers, weights, x)
    x = layers.rms_norm(x, weights.vector("shared_head.norm.weight"), config.rms_norm_eps)
    return weights.linear("shared_head.head", x)


def mlp_block(config: ModelConfig, layer: int, weights: layers.LayerWeights, hidden: torch.Tensor) -> torch.Tensor:
    """The second half of a layer: add the MLP to the residual stream [T, hidden]."""
    x, mixing = layers.mlp_entry(config, layer, weights, hidden)
    return streams.joined(mixing, hidden, whole_mlp(config, layer, weights, x))


def whole_mlp(config: ModelConfig, layer: int, weights: layers.LayerWeights, x: torch.Tensor) -> torch.Tensor:
    """A layer's MLP with all its experts on x [T, hidden]: what it adds to the stream."""
    out = layers.unrouted_mlp(config, layer, weights, x)
    if config.is_moe(layer):
        weight, ids = layers.route(config, weights, x)
        for expert in ids.unique().tolist():
            token, slot = torch.where(ids == expert)
            output = layers.mlp(config, weights, config.spec.expert_prefix(expert), x[token])
            out.index_add_(0, token, output * weight[token, slot, None])
    return out
