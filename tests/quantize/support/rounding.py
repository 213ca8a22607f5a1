"""Plain rounding, the oracle of the rounding tests."""

from __future__ import annotations

import torch


def round_int(weight: torch.Tensor, scale: torch.Tensor, largest: int) -> torch.Tensor:
    """round-half-even(W / scale) clipped to [-largest-1, largest], still fp32."""
    return torch.round(weight / scale).clamp_(-largest - 1, largest)
