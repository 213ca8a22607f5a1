"""`method: ssz`: the scale with the least squared error per row. Source: msModelSlim 26.1.0, at fp32."""

from __future__ import annotations

import torch

from glm5_ascend.quantize.methods.method import LARGEST, Method
from glm5_kernels import ops

_GRID = torch.linspace(0.2, 1.0, 24)  # below 0.2 nothing is gained, above it heavy-tailed rows lose
_STEPS = 8  # refits after the grid


class Ssz(Method):
    name = "ssz"

    def scale(self, weight: torch.Tensor, bits: int) -> torch.Tensor:
        return ops.ssz_scale(weight, LARGEST[bits], _STEPS, _GRID.to(weight.device))


SSZ = Ssz()
