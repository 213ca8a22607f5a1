"""Function-preserving transforms of fp32 weights: norm fusion, rotation, moving a scale between two tensors."""

from __future__ import annotations

import torch

from glm5_ascend.model.config import ModelConfig
from glm5_ascend.model.rotation import Rotations
from glm5_ascend.model.spec import Linear, Subgraph, Vector, Weight

#: Tensors by the names of the spec's tables.
Tensors = dict[str, torch.Tensor]


def fuse_and_rotate_inputs(rows: torch.Tensor, weight: Weight, gains: Tensors, rotations: Rotations) -> None:
    """Fold the gains g of the RMSNorms that a linear reads into some of its rows, and rotate them: W <- W diag(g) R_in.

    A norm's own gain becomes 1. Works in place; R_out^T from the left is `Rotations.rotate_outputs`.
    """
    if isinstance(weight, Linear):
        if weight.norm:
            rows *= torch.cat([gains[norm] for norm in weight.norm])
        rotations.rotate_inputs(rows, weight.basis_in)
    elif isinstance(weight, Vector) and weight.role == "norm":
        rows.fill_(1.0)


def move_scale(tensors: Tensors, config: ModelConfig, subgraph: Subgraph, scale: torch.Tensor) -> torch.Tensor:
    """Divide the source by `scale` [channels] and multiply the targets' columns by it; returns the scale applied.

    For norm-linear the norm's new gain is rounded to bf16 first and the weights get the exact inverse, because the
    engine loads norm gains in bf16.
    """
    source = f"{subgraph.source}.weight"
    if subgraph.kind == "norm-linear":
        gain = tensors[source]
        rounded = (gain / scale).to(torch.bfloat16).to(torch.float32)
        scale = torch.where(rounded != 0, gain / rounded, torch.ones_like(gain))  # a dead channel stays dead
        tensors[source] = rounded
    else:
        rows = config.source_rows(subgraph)
        if rows is None:
            tensors[source] /= scale[:, None]
        else:
            tensors[source][torch.tensor(rows).to(scale.device)] /= scale[:, None]
    for target in subgraph.targets:
        tensors[f"{target}.weight"] *= scale
    return scale
