"""Access to the weights of one layer, for the layer maths."""

from __future__ import annotations

from typing import Protocol

import torch


class LayerWeights(Protocol):
    """Access to one layer's weights; names are relative to the layer (`self_attn.q_a_proj`)."""

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., out]."""
        ...

    def vector(self, name: str) -> torch.Tensor:
        """A tensor that is no linear by its full relative name (`input_layernorm.weight`), fp32."""
        ...


def rms_norm(x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * gain over the last dimension."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * gain
