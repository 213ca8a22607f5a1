"""`method: minmax`: the largest magnitude of a row is the largest integer. Source: msModelSlim 26.1.0, at fp32."""

from __future__ import annotations

import torch

from glm5_ascend.quantize.methods.method import LARGEST, Method


class MinMax(Method):
    name = "minmax"

    def scale(self, weight: torch.Tensor, bits: int) -> torch.Tensor:
        """max|row| / largest integer; 1 for a row of zeros, whose integers are zero whatever the scale is."""
        peak = torch.maximum(weight.amax(dim=1, keepdim=True), -weight.amin(dim=1, keepdim=True))
        return torch.where(peak > 0, peak / LARGEST[bits], torch.ones_like(peak))


MINMAX = MinMax()
