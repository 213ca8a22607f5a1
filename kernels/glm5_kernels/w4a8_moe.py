"""Routed experts with int4 weights and int8 activations (W4A8_DYNAMIC); int8 weights (W8A8_DYNAMIC) alike.

For each token t and each of its experts e, with activations quantized per row (scale max|row| / 127):

    g, u   = (x_q w13[e]^T) * s_x * w13_scale[e]      gate and up
    a      = silu(min(g, limit)) * clamp(u, -limit, limit)    fp32, then quantized per row
    y      = (a_q w2[e]^T) * s_a * w2_scale[e]
    out[t] = sum over its experts of topk_weight * y  fp32, then x's dtype

T tokens, D hidden size, I expert width, E experts, k experts per token. INT4 weights are read as the checkpoint stores
them. Its `scale_bias` is not needed: it undoes a +8 shift that only the NPU's unsigned matmul makes.

Source: vllm-ascend `quantization/methods/w4a8.py` (semantics).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import silu

from glm5_kernels.contract import largest, require_shape
from glm5_kernels.errors import KernelInputError
from glm5_kernels.int8 import int8_matmul, quantize_per_token, scale_back, unpack_int4


class ExpertWeights:
    """The weights of a layer's experts: blocks of one shape, anywhere in memory, e.g. in mapped files.

    A block is uint8 [N/2, K] (packed INT4: rows 2n and 2n + 1 in the low and high halves of a byte) or int8 [N, K]. A
    model has thousands of blocks, so they are checked here, once. Raises `KernelInputError` for blocks that differ.

    Attributes:
        rows, columns: N and K. packed: INT4.
        pitch: bytes from one row in memory to the next.
    """

    def __init__(self, blocks: Sequence[Tensor]) -> None:
        self.blocks = tuple(blocks)
        if not self.blocks:
            raise KernelInputError("the experts have no weights")
        first = self.blocks[0]
        if first.dtype not in (torch.int8, torch.uint8) or first.dim() != 2 or first.stride(1) != 1:
            layout = f"{first.dtype} {list(first.shape)} with strides {list(first.stride())}"
            raise KernelInputError(f"expert weights are {layout}, expected rows of int8, or of packed INT4 in uint8")
        kind = first.dtype, first.shape, first.stride(), first.device
        for number, block in enumerate(self.blocks):
            if (block.dtype, block.shape, block.stride(), block.device) != kind:
                raise KernelInputError(f"block {number} of the expert weights has another type or layout than block 0")
        self.packed, self.pitch, self.device = first.dtype == torch.uint8, first.stride(0), first.device
        self.rows, self.columns = len(first) * (2 if self.packed else 1), first.shape[1]
        self.signature = len(self.blocks), *kind

    @cached_property
    def addresses(self) -> NDArray[np.int64]:
        """The address of each block."""
        return np.array([block.data_ptr() for block in self.blocks], np.int64)

    def codes(self, number: int) -> Tensor:
        """The weights of a block, int8 [N, K]."""
        block = self.blocks[number]
        return unpack_int4(block.view(torch.int8)) if self.packed else block


class W4a8Moe(NamedTuple):
    """The routed experts' share of the output, [T, D] in x's dtype."""

    x: Annotated[Tensor, "float [T, D]"]
    topk_weights: Annotated[Tensor, "float [T, k]"]  # router weights
    topk_ids: Annotated[Tensor, "int [T, k]"]  # negative = no expert (not on this rank)
    w13: ExpertWeights  # of each expert the gate, then the up projection, [I, D] each
    w13_scale: Annotated[Tensor, "float [E, 2I]"]  # per output row
    w2: ExpertWeights  # [D, I] of each expert
    w2_scale: Annotated[Tensor, "float [E, D]"]
    swiglu_limit: float = math.inf  # of GLM-5.3-Flash: 10; NaN stays

    def rules(self) -> None:
        """Raise `KernelInputError` unless experts, sizes, devices and the limit fit."""
        if not self.swiglu_limit > 0:
            raise KernelInputError(f"swiglu_limit is {self.swiglu_limit}, must be positive")
        experts, hidden, width = len(self.w2.blocks), self.x.shape[1], self.w13.rows
        for name, weights, blocks, shape in (
            ("w13", self.w13, 2 * experts, (width, hidden)),
            ("w2", self.w2, experts, (hidden, width)),
        ):
            if (len(weights.blocks), weights.rows, weights.columns) != (blocks, *shape):
                got = f"{len(weights.blocks)} x [{weights.rows}, {weights.columns}]"
                raise KernelInputError(f"{name} is {got}, expected {blocks} x {list(shape)}")
            if weights.device != self.x.device:
                raise KernelInputError(f"{name} is on {weights.device}, x is on {self.x.device}")
        require_shape("w13_scale", self.w13_scale, (experts, 2 * width))
        require_shape("w2_scale", self.w2_scale, (experts, hidden))

    def check_values(self) -> None:
        experts = len(self.w2.blocks)
        if largest(self.topk_ids) >= experts:
            raise KernelInputError(f"topk_ids names expert {largest(self.topk_ids)}, there are {experts}")


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
