"""A whole layer on one sequence, both halves at once: what the layer-by-layer passes are compared with."""

from __future__ import annotations

import torch

from glm5_ascend.model import layers
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
    return layers.mlp_block(config, layer, weights, hidden), selected
