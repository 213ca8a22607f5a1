"""The routed experts compiled: all experts in one pass, or by AMX one expert after the other."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import silu

from glm5_kernels.compiled import int8_amx
from glm5_kernels.compiled.int8_backends import STEP
from glm5_kernels.compiled.int8_grouped import Groups, grouped_product, of_experts, quantized
from glm5_kernels.compiled.int8_product import MAX_TOKENS
from glm5_kernels.compiled.int8_quantize import quantize_per_token, takes_rows
from glm5_kernels.compiled.jit import kernel
from glm5_kernels.compiled.simd import WIDTH
from glm5_kernels.compiled.threads import run_ranges, run_whole
from glm5_kernels.w4a8_moe import W4a8Moe, reference

Floats = NDArray[np.float32]
#: Pairs at a time: results of a size that the allocator keeps for the next ones.
_PAIRS = 1024
#: Tokens of a task of `_add`.
_TOKENS = 16


class Pairs(NamedTuple):
    """The P pairs of a token and one of its experts, sorted by expert.

    token: int64 [T * k], of which P are used. weight: fp32 [T * k]. starts: int64 [E + 1], each expert's first pair.
    experts: int64 [min(E, T * k)], those with pairs, and -1 behind them.
    """

    token: NDArray[np.int64]
    weight: Floats
    starts: NDArray[np.int64]
    experts: NDArray[np.int64]


def w4a8_moe(operands: W4a8Moe) -> torch.Tensor:
    x, topk_weights, topk_ids, w13, w13_scale, w2, w2_scale = operands
    if any(w.rows % WIDTH or w.columns % STEP for w in (w13, w2)) or not takes_rows(x):
        return reference.w4a8_moe(operands)
    total, count = topk_ids.numel(), len(w2.blocks)
    token, starts, experts = (np.empty(size, np.int64) for size in (total, count + 1, min(count, total)))
    pairs = Pairs(token, np.empty(total, np.float32), starts, experts)
    routing = topk_ids.long().contiguous().numpy(), topk_weights.float().contiguous().numpy()
    run_whole(_sort_by_expert, 1, *routing, pairs)
    operands = operands._replace(w13_scale=w13_scale.float().contiguous(), w2_scale=w2_scale.float().contiguous())
    out = torch.empty(x.shape, dtype=torch.float32).zero_()  # a recording repeats `torch.zeros` by a copy
    if total > MAX_TOKENS and _fills_amx(operands, pairs):
        _one_by_one(operands, pairs, out)
    elif total:
        _all_experts(operands, pairs, out)
    return out.to(x.dtype)


def _fills_amx(operands: W4a8Moe, pairs: Pairs) -> bool:
    """True if AMX runs here and an expert has more than MAX_TOKENS pairs in the mean."""
    counts = np.diff(pairs.starts)
    enough = counts.sum() > MAX_TOKENS * np.count_nonzero(counts)
    return bool(enough) and all(int8_amx.takes(w.blocks[0], torch.float32) for w in (operands.w13, operands.w2))


def _all_experts(operands: W4a8Moe, pairs: Pairs, out: torch.Tensor) -> None:
    """out fp32 [T, D] += the experts' share, of all experts together, _PAIRS pairs at a time."""
    x, w13 = quantized(operands.x), of_experts(operands.w13, operands.w13_scale)
    w2 = of_experts(operands.w2, operands.w2_scale)
    total = len(pairs.token)
    for first in range(0, total, _PAIRS):
        rows = slice(first, min(first + _PAIRS, total))
        token, weight = pairs.token[rows], pairs.weight[rows]
        starts, experts = pairs.starts, pairs.experts
        if total > _PAIRS:
            starts = np.clip(starts - first, 0, len(token))
            experts = np.flatnonzero(np.diff(starts))
        groups = Groups(token, starts, experts)
        gate, up = grouped_product(x, groups, w13, torch.float32).chunk(2, dim=-1)  # [P, I] each
        hidden = quantized(silu(gate).mul_(up))
        y = grouped_product(hidden, groups._replace(rows=np.arange(len(token))), w2, torch.float32)
        run_ranges(_add, len(out), _TOKENS, y.numpy(), token, weight, starts, out.numpy())


def _one_by_one(operands: W4a8Moe, pairs: Pairs, out: torch.Tensor) -> None:
    """out fp32 [T, D] += the experts' share, by AMX; a token is quantized once for all of them."""
    codes, factors = quantize_per_token(operands.x)
    for e in np.flatnonzero(np.diff(pairs.starts)).tolist():
        chunk = slice(pairs.starts[e], pairs.starts[e + 1])
        rows, blocks = torch.from_numpy(pairs.token[chunk]), operands.w13.blocks[2 * e : 2 * e + 2]
        gate, up = (
            int8_amx.multiply(codes[rows], factors[rows], block, scale, torch.float32)  # [n, I]
            for block, scale in zip(blocks, operands.w13_scale[e].chunk(2), strict=True)
        )
        hidden = quantize_per_token(silu(gate).mul_(up))
        y = int8_amx.multiply(*hidden, operands.w2.blocks[e], operands.w2_scale[e], torch.float32)  # [n, D]
        token, weight = pairs.token[chunk], pairs.weight[chunk]
        run_ranges(_add, len(out), _TOKENS, y.numpy(), token, weight, np.array([len(token)]), out.numpy())


@kernel
def _sort_by_expert(first: int, last: int, ids: NDArray[np.int64], weights: Floats, pairs: Pairs) -> None:
    """pairs <- those of ids, weights [T, k] with an id >= 0: a counting sort, the only task."""
    token, weight, starts, experts = pairs
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
    starts[0], count = 0, 0
    experts[:] = -1
    for e in range(len(starts) - 1):
        if starts[e] < starts[e + 1]:
            experts[count] = e
            count += 1


@kernel
def _add(
    first: int, last: int, y: Floats, token: NDArray[np.int64], weight: Floats, starts: NDArray[np.int64], out: Floats
) -> None:
    """out[token] += y * weight for each pair of the tokens first..last, in the order of the starts[-1] pairs."""
    for pair in range(starts[len(starts) - 1]):
        if first <= token[pair] < last:
            for column in range(y.shape[1]):
                out[token[pair], column] += y[pair, column] * weight[pair]
