"""Plain torch version of the routed experts: one expert at a time, over the tokens routed to it."""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from glm5_kernels.int8 import int8_matmul, quantize_per_token, scale_back
from glm5_kernels.w4a8_moe import W4a8Moe


def w4a8_moe(operands: W4a8Moe) -> torch.Tensor:
    x, topk_weights, topk_ids, w13, w13_scale, w2, w2_scale, limit = operands
    out = torch.zeros(x.shape, dtype=torch.float32)
    for e in sorted(set(topk_ids.flatten().tolist())):
        if e < 0:
            continue
        token, slot = torch.where(topk_ids == e)
        x_q, x_scale = quantize_per_token(x[token])
        gate, up = (
            scale_back(int8_matmul(x_q, w13.codes(2 * e + part)), x_scale, scale, torch.float32)  # [n, I]
            for part, scale in enumerate(w13_scale[e].chunk(2))
        )
        a_q, a_scale = quantize_per_token(silu(gate.clamp(max=limit)) * up.clamp(-limit, limit))
        y = scale_back(int8_matmul(a_q, w2.codes(e)), a_scale, w2_scale[e], torch.float32)  # [n, D]
        out.index_add_(0, token, y * topk_weights[token, slot, None].float())
    return out.to(x.dtype)
