"""vllm-ascend's call of the MLAPO kernel in the terms of our `mla_preprocess`.

The layer keeps its weights as the kernel wants them (`_process_weights_for_fused_mlapo` of 0.23.0): rows kv | k_pe | q,
the rotated rows of each head even ones first, int8 matrices in blocks of 32 columns. Here they are put back in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from glm5_kernels import ops

EPS = 1e-6  # fixed in the kernel


def arguments(call: Mapping[str, Any]) -> tuple[Any, ...]:
    """Of `mla_preprocess`, on the host, with caches of its own: row i is token i's."""
    layer, hidden = call["sfa_impl"], call["hidden_states"].cpu()
    w_uk_t, rope = layer.W_UK_T.cpu(), call["kv_cache"][1].shape[-1]
    heads, nope, rank = w_uk_t.shape
    cos, sin = (call[name].cpu().view(len(hidden), rope)[:, : rope // 2] for name in ("cos", "sin"))
    rows = torch.arange(layer.q_lora_rank + rank + rope)
    first = torch.cat([rows[-rank - rope : -rope], evens_first(rows[-rope:]), rows[: layer.q_lora_rank]])
    rows = torch.arange(heads * (nope + rope)).view(heads, nope + rope)
    second = torch.cat([rows[:, :nope], evens_first(rows[:, nope:])], dim=1).flatten()
    return (
        hidden,
        cos.contiguous(),
        sin.contiguous(),
        _weights(first, layer.wd_qkv, layer.deq_scale_qkv, layer.quant_bias_qkv, layer.quant_scale0,
                 layer.quant_offset0),
        _weights(second, layer.wu_q, layer.qb_deq_scl, layer.qb_qt_bias, layer.quant_scale1, layer.quant_offset1),
        w_uk_t,
        layer.gamma1.cpu(),
        layer.gamma2.cpu(),
        torch.arange(len(hidden)),
        hidden.new_empty(1, len(hidden), rank),
        hidden.new_empty(1, len(hidden), rope),
        EPS,
    )  # fmt: skip


def answered(call: Mapping[str, Any], answer: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    """What the kernel gave and wrote, on the host, rotated pairs side by side as in our op; by name."""
    slots = call["slot_mapping"].cpu()
    written = [cache.cpu().flatten(0, -2)[slots.clamp_min(0)] for cache in call["kv_cache"][:2]]
    _, ql_nope, q_pe, q_c = (each.cpu() for each in answer)
    found = {"ql_nope": ql_nope, "q_pe": side_by_side(q_pe), "q_c": q_c}
    return found | {"latents": written[0][slots >= 0], "keys": side_by_side(written[1])[slots >= 0]}


def evens_first(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)


def side_by_side(x: torch.Tensor) -> torch.Tensor:
    """Undoes `evens_first`."""
    return torch.stack(x.chunk(2, dim=-1), dim=-1).flatten(-2)


def _weights(
    rows: torch.Tensor,
    blocks: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor,
    input_scale: torch.Tensor,
    input_offset: torch.Tensor,
) -> ops.LinearWeights:
    """rows: our row behind each of the kernel's. blocks: int8 [1, K / 32, N, 32]."""
    order = rows.argsort()
    weight = blocks.cpu()[0].transpose(0, 1).flatten(1)[: len(rows)]
    return ops.LinearWeights(
        weight[order].contiguous(),
        ops.PER_TENSOR,
        scale.cpu()[order].float(),
        input_scale.cpu().float().reshape(-1)[:1],
        input_offset.cpu().float().reshape(-1)[:1],
        bias.cpu()[order],
    )
