"""The weights of a decoder layer's sublayers, as the structs of csrc/glm5_kernels.h that hold them.

They are checked and packed once: in each step that would take longer than the products of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from glm5_kernels.contract import check
from glm5_kernels.errors import KernelInputError, UnsupportedVariantError
from glm5_kernels.int8 import PER_TENSOR, LinearWeights
from glm5_kernels.native.library import struct_of
from glm5_kernels.native.rows import BLOCKS, FLOATS, LANES, ROWS, blocks, matrix, rows
from glm5_kernels.w4a8_moe import ExpertWeights, W4a8Moe

#: The fields of a struct Linear, of an indexer and of experts, which are 0 if there is none, and of the whole structs.
_LINEAR = "i" + 2 * "piipppp"
_INDEXER = 2 * ROWS + "dd" + "iii" + 2 * _LINEAR
MLA = 5 * ROWS + "ddd" + 9 * "i" + 3 * _LINEAR + _INDEXER
_EXPERTS = _LINEAR + "p" + "iii" + "dd" + 2 * BLOCKS
MLP = ROWS + "d" + "ii" + 2 * _LINEAR + _EXPERTS

#: A linear layer: one or two weights, whose results lie side by side.
Linear = Sequence[LinearWeights]


class IndexerWeights(NamedTuple):
    """The indexer of an attention sublayer: H heads of D dims."""

    wk_weights: Linear  # [D + H, hidden size]: keys, then a weight for each head
    wq_b: Linear  # [H * D, q_lora]
    k_weight: Tensor  # [D], of the norm
    k_bias: Tensor
    eps: float
    interleaved: bool  # rotated pairs are neighbours


class MlaWeights(NamedTuple):
    """The weights of an attention sublayer: H heads of `nope` and `rope` dims, latents of R, values of V."""

    norm_weight: Tensor
    norm_eps: float
    qkv_a: Linear  # [q_lora + R + rope, hidden size]
    q_b: Linear  # [H * (nope + rope), q_lora]
    o_proj: Linear  # [hidden size, H * V]
    q_gamma: Tensor  # [q_lora]
    kv_gamma: Tensor  # [R]
    latent_eps: float
    w_uk_t: Tensor  # [H, nope, R]
    w_uv: Tensor  # [H, R, V]
    rope: int
    scale: float  # of the scores
    indexer: IndexerWeights | None


class RoutedExperts(NamedTuple):
    """Experts, and their choice by the largest sigmoid(logit) + correction_bias."""

    router: Linear  # [E, hidden size]
    correction_bias: Tensor  # [E]
    per_token: int
    renormalizes: bool
    routed_scale: float
    w13: ExpertWeights
    w13_scale: Tensor
    w2: ExpertWeights
    w2_scale: Tensor
    swiglu_limit: float


class MlpWeights(NamedTuple):
    """The weights of an MLP sublayer; with `experts` the MLP is that of the shared experts."""

    norm_weight: Tensor
    norm_eps: float
    gate_up: Linear  # [2 * width, hidden size]
    down: Linear
    experts: RoutedExperts | None


class Struct:
    """A struct in memory, with the objects that hold what it points to."""

    def __init__(self, fields: str, values: Sequence[float], *holders: object) -> None:
        self.holders, self.bytes = holders, np.frombuffer(struct_of(fields).pack(*values), np.uint8)
        self.address: int = self.bytes.ctypes.data


def require(fits: bool, what: str) -> None:
    if not fits:
        raise UnsupportedVariantError(f"a sublayer in one call takes {what} only")


class _Fields:
    """The fields of weights; holds the tensors that are made for them."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def pointer(self, x: Tensor | None) -> int:
        """The address of x as fp32, or as int32 if that is its dtype; 0 of None."""
        if x is None:
            return 0
        self.tensors.append((x if x.dtype == torch.int32 else x.float()).contiguous())
        return self.tensors[-1].data_ptr()

    def vector(self, x: Tensor) -> tuple[int, ...]:
        require(x.dtype in FLOATS and not len(x) % LANES, "norms of fp32 or bf16, in whole vectors,")
        self.tensors.append(x.contiguous())
        return matrix(self.tensors[-1])

    def linear(self, parts: Linear, rows: int, k: int) -> list[int]:
        """The struct Linear of a weight [rows, k]."""
        shapes = [list(part.weight.shape) for part in parts]
        if {shape[1] for shape in shapes} != {k} or sum(shape[0] for shape in shapes) != rows:
            raise KernelInputError(f"a linear layer has weights {shapes}, expected [{rows}, {k}]")
        fields = [k]
        for part in parts:
            check(part)
            weight, is_int8 = part.weight, part.scale is not None
            fits = weight.dtype == torch.int8 if is_int8 else weight.dtype == torch.bfloat16 and not k % (2 * LANES)
            require(len(parts) <= 2 and fits and weight.stride(1) == 1, "one or two weights of int8 or bf16")
            static = part[3:] if part.quant_mode == PER_TENSOR else (None, None, None)
            fields += [weight.data_ptr(), weight.stride(0), len(weight), *map(self.pointer, (part.scale, *static))]
            self.tensors.append(weight)
        return fields + [0] * (len(_LINEAR) - len(fields))

    def heads(self, w: Tensor) -> tuple[tuple[int, ...], bool]:
        """The struct Rows of w [H, n, r], and True if its columns are contiguous."""
        by_rows = w.stride(1) == 1
        fits = (
            w.dtype == torch.bfloat16
            and (by_rows or w.stride(2) == 1)
            and not any(x % (2 * LANES) for x in w.shape[1:])
        )
        require(fits, "heads of bf16 in whole vectors")
        self.tensors.append(w)
        return rows(w.mT if by_rows else w), by_rows


def pack_attention(w: MlaWeights) -> Struct:
    """The struct MlaWeights.

    Raises:
        KernelInputError: sizes differ. UnsupportedVariantError: C++ does not take these sizes, dtypes or strides.
    """
    (heads, nope, rank), values, q_lora, hidden = w.w_uk_t.shape, w.w_uv.shape[2], len(w.q_gamma), len(w.norm_weight)
    if w.w_uv.shape[:2] != (heads, rank) or len(w.kv_gamma) != rank:
        raise KernelInputError(f"W_UK_T {list(w.w_uk_t.shape)}, W_UV {list(w.w_uv.shape)} and the norms do not fit")
    require(not w.rope % LANES, "rotated dims in whole vectors")
    fields = _Fields()
    (uk, uk_by_rows), (uv, uv_by_rows) = fields.heads(w.w_uk_t), fields.heads(w.w_uv)
    vectors = [field for x in (w.norm_weight, w.q_gamma, w.kv_gamma) for field in fields.vector(x)]
    linears = fields.linear(w.qkv_a, q_lora + rank + w.rope, hidden)
    linears += fields.linear(w.q_b, heads * (nope + w.rope), q_lora) + fields.linear(w.o_proj, hidden, heads * values)
    sizes = hidden, heads, nope, w.rope, rank, q_lora, values, uk_by_rows, uv_by_rows
    indexer = _pack_indexer(fields, w.indexer, hidden, q_lora)
    numbers = w.norm_eps, w.latent_eps, w.scale, *sizes
    return Struct(MLA, [*vectors, *uk, *uv, *numbers, *linears, *indexer], fields.tensors)


def _pack_indexer(fields: _Fields, w: IndexerWeights | None, hidden: int, q_lora: int) -> list[float]:
    if w is None:
        return [0] * len(_INDEXER)
    dim, rows_of_q = len(w.k_weight), sum(len(part.weight) for part in w.wq_b)
    heads = rows_of_q // dim
    return [
        *fields.vector(w.k_weight), *fields.vector(w.k_bias), w.eps, dim**-0.5 * heads**-0.5, heads, dim, w.interleaved,
        *fields.linear(w.wk_weights, dim + heads, hidden), *fields.linear(w.wq_b, heads * dim, q_lora),
    ]  # fmt: skip


def pack_mlp(w: MlpWeights) -> Struct:
    """The struct MlpWeights. Raises as `pack_attention` does."""
    hidden, width = len(w.norm_weight), sum(len(part.weight) for part in w.gate_up) // 2
    require(not width % LANES, "widths in whole vectors")
    fields = _Fields()
    values = [*fields.vector(w.norm_weight), w.norm_eps, hidden, width]
    values += [*fields.linear(w.gate_up, 2 * width, hidden), *fields.linear(w.down, hidden, width)]
    values += [0] * len(_EXPERTS) if w.experts is None else _pack_experts(fields, w.experts, hidden)
    return Struct(MLP, values, fields.tensors, w)


def _pack_experts(fields: _Fields, e: RoutedExperts, hidden: int) -> list[float]:
    experts, no_tokens = len(e.w2.blocks), torch.empty(0, e.per_token)
    check(W4a8Moe(torch.empty(0, hidden), no_tokens, no_tokens.long(), *e[5:]))
    if not 0 < e.per_token <= experts or e.correction_bias.shape != (experts,):
        raise KernelInputError(f"{e.per_token} of {experts} experts per token, biases {list(e.correction_bias.shape)}")
    scales = e.w13_scale.float().contiguous(), e.w2_scale.float().contiguous()
    fields.tensors += scales
    return [
        *fields.linear(e.router, experts, hidden), fields.pointer(e.correction_bias), experts, e.per_token,
        e.renormalizes, e.routed_scale, e.swiglu_limit, *blocks(e.w13, scales[0]), *blocks(e.w2, scales[1]),
    ]  # fmt: skip
