"""The routed experts compiled: few tokens per expert in one pass over all of them, many one expert at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from glm5_kernels.compiled import int8_dots, int8_product
from glm5_kernels.compiled.int8_rows import COMPILED, fits
from glm5_kernels.compiled.jit import kernel
from glm5_kernels.w4a8_moe import reference
from glm5_kernels.workspace import Bound, Workspace


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
    ids = topk_ids.long().contiguous()
    named = ids.numpy()[ids.numpy() >= 0]
    used = np.count_nonzero(np.bincount(named))
    given = x, topk_weights.float().contiguous(), ids, w13, w13_scale, w2, w2_scale
    if not _takes(x, w13, w13_scale, w2, w2_scale) or not 0 < len(named) <= int8_dots.TOKENS * used:
        return _one_by_one(*given)
    out = torch.empty(x.shape, dtype=torch.float32)
    for call in _bind_experts(*given, out, Workspace()):
        call()
    return out.to(x.dtype)


def bind(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    room: Workspace,
) -> Bound | None:
    """`w4a8_moe` bound to its operands; None for those that compiled code does not take.

    topk_weights: fp32, contiguous. topk_ids: int64, contiguous; those it holds are looked at in each call.
    """
    operands = x, topk_weights, topk_ids, w13, w13_scale, w2, w2_scale
    reference.check(*operands)
    few = 0 < len(x) <= int8_dots.TOKENS and topk_weights.dtype == torch.float32 and topk_ids.dtype == torch.int64
    if not few or not _takes(x, w13, w13_scale, w2, w2_scale):
        return None
    sums = room.tensor("experts", tuple(x.shape), torch.float32)
    out, ids = room.tensor("experts", tuple(x.shape), x.dtype), topk_ids.numpy()

    def look() -> None:
        if ids.max() >= len(w13):
            reference.check(*operands)

    calls = [look, *_bind_experts(x, topk_weights, topk_ids, w13, w13_scale, w2, w2_scale, sums, room)]
    if out is not sums:
        calls.append(lambda: out.copy_(sums))
    return Bound(calls, (out,), *operands)


def _takes(
    x: torch.Tensor, w13: torch.Tensor, w13_scale: torch.Tensor, w2: torch.Tensor, w2_scale: torch.Tensor
) -> bool:
    return int8_product.multiplies(w13, w13_scale) and int8_product.multiplies(w2, w2_scale) and fits(x)


def _bind_experts(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, w13: torch.Tensor, w13_scale: torch.Tensor,
    w2: torch.Tensor, w2_scale: torch.Tensor, out: torch.Tensor, room: Workspace,
) -> list[Callable[[], object]]:  # fmt: skip
    """What makes out fp32 [T, D] <- the experts' share of tokens that stay where they are."""
    most, width = topk_ids.numel(), w13.shape[1]
    token, own = (room.array(use, (most,), np.int64) for use in ("token of a pair", "pair"))
    own[:] = np.arange(most)
    weight, starts = (
        room.array("weight of a pair", (most,), np.float32),
        room.array("starts", (len(w13) + 1,), np.int64),
    )
    gate_up = room.tensor("gate and up", (most, width), torch.float32)
    hidden, y = (
        room.tensor(use, (most, n), torch.float32) for use, n in (("hidden", width // 2), ("pairs", w2.shape[1]))
    )
    gate, up = gate_up.chunk(2, dim=-1)  # [P, I] each
    return [
        partial(_by_expert, topk_ids.numpy(), topk_weights.numpy(), starts, token, weight),
        int8_product.bind_grouped(x, token, starts, w13, w13_scale, gate_up, None, room),
        lambda: torch.ops.aten.silu.out(gate, out=hidden),
        lambda: hidden.mul_(up),
        int8_product.bind_grouped(hidden, own, starts, w2, w2_scale, y, None, room),
        partial(_mix, y.numpy(), starts, token, weight, out.numpy()),
    ]


def _one_by_one(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, w13: torch.Tensor, w13_scale: torch.Tensor,
    w2: torch.Tensor, w2_scale: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """One expert after the other; a token is quantized once for all of its experts."""
    token, weight = np.empty(topk_ids.numel(), np.int64), np.empty(topk_ids.numel(), np.float32)
    out, starts = torch.zeros(x.shape, dtype=torch.float32), np.empty(len(w13) + 1, np.int64)
    _by_expert(topk_ids.numpy(), topk_weights.numpy(), starts, token, weight)
    codes, factors = COMPILED.quantize_per_token(x)
    for e in np.flatnonzero(np.diff(starts)).tolist():
        own = slice(starts[e], starts[e + 1])
        rows = torch.from_numpy(token[own])
        gate_up = int8_product.multiply(codes[rows], factors[rows], w13[e], w13_scale[e])
        gate, up = gate_up.chunk(2, dim=-1)  # [n, I] each
        hidden = COMPILED.quantize_per_token(torch.nn.functional.silu(gate).mul_(up))
        y = int8_product.multiply(*hidden, w2[e], w2_scale[e])  # [n, D]
        _add(y.numpy(), len(y), token[own], weight[own], out.numpy())
    return out.to(x.dtype)


@kernel
def _by_expert(ids: Any, weights: Any, starts: Any, token: Any, weight: Any) -> None:
    """Token and weight of the pairs of ids, weights [T, k] with an id >= 0, by expert; starts [E + 1]: of each."""
    for expert in range(len(starts)):
        starts[expert] = 0
    for expert in ids.flat:
        if expert >= 0:
            starts[expert + 1] += 1
    for expert in range(1, len(starts)):
        starts[expert] += starts[expert - 1]
    for row in range(ids.shape[0]):
        for slot in range(ids.shape[1]):
            expert = ids[row, slot]
            if expert >= 0:
                token[starts[expert]], weight[starts[expert]] = row, weights[row, slot]
                starts[expert] += 1  # now where the next one's begin
    for expert in range(len(starts) - 1, 0, -1):
        starts[expert] = starts[expert - 1]
    starts[0] = 0


@kernel
def _add(y: Any, pairs: Any, token: Any, weight: Any, out: Any) -> None:
    """out[token] += y * weight of so many pairs, in order."""
    for pair in range(pairs):
        for column in range(y.shape[1]):
            out[token[pair], column] += y[pair, column] * weight[pair]


@kernel
def _mix(y: Any, starts: Any, token: Any, weight: Any, out: Any) -> None:
    """out[token] <- the sum of y * weight of the token's pairs, in order."""
    for row in range(out.shape[0]):
        for column in range(out.shape[1]):
            out[row, column] = 0
    _add(y, starts[-1], token, weight, out)
