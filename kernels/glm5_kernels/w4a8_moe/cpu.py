"""The routed experts compiled: few tokens per expert in one pass over all of them, many one expert at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from glm5_kernels.compiled import int8_dots, int8_product
from glm5_kernels.compiled.int8_rows import COMPILED, fits
from glm5_kernels.compiled.jit import kernel
from glm5_kernels.w4a8_moe import reference


def w4a8_moe(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
) -> torch.Tensor:
    """See the package docstring."""
    operands = x, topk_weights, topk_ids, w13, w13_scale, w2, w2_scale
    reference.check(*operands)
    token, weight, starts = _by_expert(topk_ids.long().numpy(), topk_weights.float().numpy(), len(w13))
    used = max(1, int(np.count_nonzero(np.diff(starts))))
    takes = int8_product.multiplies(w13, w13_scale) and int8_product.multiplies(w2, w2_scale) and fits(x)
    if not takes or not 0 < len(token) <= int8_dots.TOKENS * used:
        return reference.w4a8_moe(*operands, arithmetic=COMPILED)
    gate, up = int8_product.grouped(x, token, starts, w13, w13_scale, torch.float32).chunk(2, dim=-1)  # [P, I] each
    hidden = torch.nn.functional.silu(gate) * up
    y = int8_product.grouped(hidden, np.arange(len(token)), starts, w2, w2_scale, torch.float32)  # [P, D]
    out = torch.zeros(x.shape, dtype=torch.float32)
    _mix(y.numpy(), token, weight, out.numpy())
    return out.to(x.dtype)


@kernel
def _by_expert(ids: Any, weights: Any, experts: Any) -> Any:
    """Token and weight of the P pairs of ids, weights [T, k] sorted by expert, and where each expert's begin."""
    starts = np.zeros(experts + 1, np.int64)
    for expert in ids.flat:
        if expert >= 0:
            starts[expert + 1] += 1
    starts = np.cumsum(starts)
    place, token, weight = starts.copy(), np.empty(starts[-1], np.int64), np.empty(starts[-1], np.float32)
    for row in range(ids.shape[0]):
        for slot in range(ids.shape[1]):
            expert = ids[row, slot]
            if expert >= 0:
                token[place[expert]], weight[place[expert]] = row, weights[row, slot]
                place[expert] += 1
    return token, weight, starts


@kernel
def _mix(y: Any, token: Any, weight: Any, out: Any) -> None:
    """out[token] += y * weight, in order."""
    for pair in range(len(y)):
        for column in range(y.shape[1]):
            out[token[pair], column] += y[pair, column] * weight[pair]
