"""Plain torch version of the routed experts: one expert at a time, over the tokens routed to it."""

from __future__ import annotations

import torch

from glm5_kernels.errors import KernelInputError, require_device, require_floats, require_integers, require_shape
from glm5_kernels.int8 import PLAIN, Arithmetic


def w4a8_moe(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    arithmetic: Arithmetic = PLAIN,
) -> torch.Tensor:
    """See the package docstring."""
    check(x, topk_weights, topk_ids, w13, w13_scale, w2, w2_scale)
    out = torch.zeros(x.shape, dtype=torch.float32)
    for e in sorted(set(topk_ids.flatten().tolist())):
        if e < 0:
            continue
        token, slot = torch.where(topk_ids == e)
        x_q, x_scale = arithmetic.quantize_per_token(x[token])
        z = arithmetic.scale_back(arithmetic.matmul(x_q, w13[e]), x_scale, w13_scale[e], torch.float32)
        gate, up = z.chunk(2, dim=-1)  # [n, I] each
        a_q, a_scale = arithmetic.quantize_per_token(torch.nn.functional.silu(gate) * up)
        y = arithmetic.scale_back(arithmetic.matmul(a_q, w2[e]), a_scale, w2_scale[e], torch.float32)  # [n, D]
        out.index_add_(0, token, y * topk_weights[token, slot, None].float())
    return out.to(x.dtype)


def check(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
) -> None:
    """Raise `KernelInputError` unless the arguments fit."""
    require_shape("w13", w13, (None, None, None))
    experts, width2, hidden = w13.shape
    require_shape("x", x, (None, hidden))
    require_shape("topk_ids", topk_ids, (len(x), None))
    require_integers("topk_ids", topk_ids)
    require_floats(x=x, topk_weights=topk_weights, w13_scale=w13_scale, w2_scale=w2_scale)
    require_device(x, topk_weights=topk_weights, topk_ids=topk_ids, w13=w13, w2=w2)
    require_device(x, w13_scale=w13_scale, w2_scale=w2_scale)
    if w13.dtype != torch.int8 or w2.dtype != torch.int8:
        raise KernelInputError(f"w13 is {w13.dtype} and w2 {w2.dtype}, both must be int8")
    require_shape("w13_scale", w13_scale, (experts, width2))
    require_shape("w2", w2, (experts, hidden, width2 // 2))
    require_shape("w2_scale", w2_scale, (experts, hidden))
    require_shape("topk_weights", topk_weights, (x.shape[0], topk_ids.shape[1]))
    if topk_ids.numel() and int(topk_ids.max()) >= experts:
        raise KernelInputError(f"topk_ids names expert {int(topk_ids.max())}, there are {experts}")
