"""Random ids, and the training forward on packed rows of them, for the small models."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.training import attention, trunk


def tokens_of(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 1000, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(
    model: Any, rotary: Any, tokens: torch.Tensor, mode: attention.Mode, segments: torch.Tensor | None = None
) -> torch.Tensor:
    """Logits of the training forward; `rotary` gives the angles of positions, which begin at 0 in each segment."""
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    segments = torch.zeros_like(tokens) if segments is None else segments
    positions = positions - torch.tensor([[int((row == s).nonzero()[0]) for s in row] for row in segments])
    layout = attention.packed(rotary, segments, positions)
    hidden, _ = trunk.trunk_forward(model, tokens, layout, mode, learn=False)
    output: torch.Tensor = model.lm_head(hidden)
    return output
