"""A whole layer on one sequence, both halves at once: what the layer-by-layer passes are compared with."""

from __future__ import annotations

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
