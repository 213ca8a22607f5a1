"""Function-preserving transforms of one layer's weights: norm fusion, rotation, moving a scale between two tensors.

All work in place on `tensors`, a dict of fp32 tensors keyed by the names of the structure table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from glm5_ascend.model.config import ModelConfig
from glm5_ascend.model.rotation import Rotations
from glm5_ascend.model.spec import Linear, Subgraph, Vector

Tensors = dict[str, torch.Tensor]


def fuse_norms(tensors: Tensors, parts: Iterable[Linear | Vector], gains: Mapping[str, torch.Tensor]) -> None:
    """Fold each RMSNorm's gain into the weights that read it: W <- W diag(g), g <- 1."""
    for part in parts:
        name = part.tensor_name
        if isinstance(part, Linear) and part.norm:
            tensors[name] *= torch.cat([gains[norm] for norm in part.norm])
        elif isinstance(part, Vector) and part.role == "norm":
            tensors[name].fill_(1.0)


def rotate(tensors: Tensors, parts: Iterable[Linear | Vector], rotations: Rotations) -> None:
    for part in parts:
        if isinstance(part, Linear):
            rotations.rotate_weight(tensors[part.tensor_name], part.basis_in, part.basis_out)


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
