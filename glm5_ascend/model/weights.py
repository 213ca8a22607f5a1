"""Access to the weights of one layer, for the layer maths."""

from __future__ import annotations

import platform
from typing import Protocol

import torch

#: True if torch has oneDNN's products in fp32, on x86: elsewhere it has other libraries.
_ONEDNN = (
    platform.machine() == "x86_64"
    and torch.backends.mkldnn.is_available()
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
)


class LayerWeights(Protocol):
    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., out]."""
        ...

    def vector(self, name: str) -> torch.Tensor:
        """A tensor that is no linear by its full relative name (`input_layernorm.weight`), fp32."""
        ...


def fp32_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [..., K] times weight [N, K] transposed, fp32 -> [..., N].

    By oneDNN: MKL, which torch takes for fp32, needs 1.15 to 1.4 times as long on an AMD.
    """
    if _ONEDNN and x.dtype == weight.dtype == torch.float32:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
        return out
    return x @ weight.T


def rms_norm(x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * gain over the last dimension."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * gain
