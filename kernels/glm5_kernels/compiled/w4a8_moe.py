"""The routed experts compiled: few tokens per expert in one pass over all experts, many one expert at a time."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import silu

from glm5_kernels.compiled import int8_amx
from glm5_kernels.compiled.int8_grouped import Groups, grouped_product, takes_weight
from glm5_kernels.compiled.int8_product import MAX_TOKENS, matmul
from glm5_kernels.compiled.int8_quantize import quantize_per_token, scale_back_to, takes_rows
from glm5_kernels.compiled.jit import kernel
from glm5_kernels.w4a8_moe import W4a8Moe

Floats = NDArray[np.float32]


class Pairs(NamedTuple):
    """The P pairs of a token and one of its experts, sorted by expert.

    token: int64 [T * k], of which P are used. weight: fp32 [T * k]. starts: int64 [E + 1], each expert's first pair.
    """

    token: NDArray[np.int64]
    weight: Floats
    starts: NDArray[np.int64]


def w4a8_moe(operands: W4a8Moe) -> torch.Tensor:
    x, topk_weights, topk_ids, w13, w13_scale, w2, w2_scale = operands
    pairs = Pairs(
        np.empty(topk_ids.numel(), np.int64), np.empty(topk_ids.numel(), np.float32), np.empty(len(w13) + 1, np.int64)
    )
    _sort_by_expert(topk_ids.long().contiguous().numpy(), topk_weights.float().contiguous().numpy(), pairs)
    count, used = int(pairs.starts[-1]), np.count_nonzero(np.diff(pairs.starts))
    takes = takes_weight(w13, w13_scale) and takes_weight(w2, w2_scale) and takes_rows(x)
    out = torch.zeros(x.shape, dtype=torch.float32)
    if takes and 0 < count <= MAX_TOKENS * used:
        _all_experts(operands, pairs, out)
    else:
        _one_by_one(operands, pairs, out)
    return out.to(x.dtype)


def _all_experts(operands: W4a8Moe, pairs: Pairs, out: torch.Tensor) -> None:
    """out fp32 [T, D] += the experts' share, in one pass over all experts."""
    count = int(pairs.starts[-1])
    by_token = Groups(pairs.token[:count], pairs.starts)
    gate_up = grouped_product(operands.x, by_token, operands.w13, operands.w13_scale, torch.float32)
    gate, up = gate_up.chunk(2, dim=-1)  # [P, I] each
    groups = Groups(np.arange(count), pairs.starts)
    y = grouped_product(silu(gate).mul_(up), groups, operands.w2, operands.w2_scale, torch.float32)
    _add(y.numpy(), pairs.token[:count], pairs.weight[:count], out.numpy())


def _one_by_one(operands: W4a8Moe, pairs: Pairs, out: torch.Tensor) -> None:
    """out fp32 [T, D] += the experts' share, one expert after the other; a token is quantized once for all of them."""
    codes, factors = quantize_per_token(operands.x)
    for e in np.flatnonzero(np.diff(pairs.starts)).tolist():
        chunk = slice(pairs.starts[e], pairs.starts[e + 1])
        rows = torch.from_numpy(pairs.token[chunk])
        gate_up = _multiply(codes[rows], factors[rows], operands.w13[e], operands.w13_scale[e])
        gate, up = gate_up.chunk(2, dim=-1)  # [n, I] each
        hidden_codes, hidden_factors = quantize_per_token(silu(gate).mul_(up))
        y = _multiply(hidden_codes, hidden_factors, operands.w2[e], operands.w2_scale[e])  # [n, D]
        _add(y.numpy(), pairs.token[chunk], pairs.weight[chunk], out.numpy())


def _multiply(codes: torch.Tensor, factors: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """codes int8 [T, K] times weight int8 [N, K] transposed, times factors [T, 1] and scale [N] -> fp32 [T, N]."""
    if int8_amx.takes(weight, torch.float32) and len(codes) > MAX_TOKENS:
        return int8_amx.multiply(codes, factors, weight, scale, torch.float32)
    out = torch.empty(len(codes), len(weight))
    scale_back_to(out, matmul(codes, weight), factors, scale)
    return out


@kernel
def _sort_by_expert(ids: NDArray[np.int64], weights: Floats, pairs: Pairs) -> None:
    """pairs <- those of ids, weights [T, k] with an id >= 0: a counting sort."""
    token, weight, starts = pairs
    starts[:] = 0
    for expert in ids.flat:
        if expert >= 0:
            starts[expert + 1] += 1
    for e in range(1, len(starts)):
        starts[e] += starts[e - 1]
    for row in range(ids.shape[0]):
        for slot in range(ids.shape[1]):
            expert = ids[row, slot]
            if expert >= 0:
                token[starts[expert]], weight[starts[expert]] = row, weights[row, slot]
                starts[expert] += 1  # now where the next pair belongs
    for e in range(len(starts) - 1, 0, -1):
        starts[e] = starts[e - 1]
    starts[0] = 0


@kernel
def _add(y: Floats, token: NDArray[np.int64], weight: Floats, out: Floats) -> None:
    """out[token] += y * weight for each pair, in order."""
    for pair in range(len(y)):
        for column in range(y.shape[1]):
            out[token[pair], column] += y[pair, column] * weight[pair]
