"""The int8 linear layer with our own product where a library's is slow: for a few tokens."""

from __future__ import annotations

import torch

from glm5_kernels import vnni
from glm5_kernels.int8 import LinearWeights
from glm5_kernels.int8_linear import reference


def int8_linear(x: torch.Tensor, w: LinearWeights) -> torch.Tensor:
    """See the package docstring."""
    return reference.int8_linear(x, w, vnni.matmul)
