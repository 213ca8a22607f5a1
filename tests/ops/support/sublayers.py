"""Decoder layers of drawn weights for the sublayers in one call, and the same computed op by op."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from glm5_kernels import ops
from glm5_kernels.parity.cases import linear_weights

HIDDEN, HEADS, NOPE, ROPE, RANK, Q_LORA, VALUES, INDEX_HEADS, INDEX_DIM = 96, 3, 32, 32, 64, 64, 32, 3, 48
WIDTH, EXPERTS, PER_TOKEN, BLOCK_SIZE, BLOCKS = 48, 5, 2, 16, 6


class Layer(NamedTuple):
    attention: ops.MlaWeights
    mlp: ops.MlpWeights
    mode: str


class Step(NamedTuple):
    """Operands of a step: x, the residual stream, angles of attention and indexer, slots, caches [latents, keys]."""

    x: Tensor
    residual: Tensor | None
    angles: tuple[Tensor, Tensor]
    batch: ops.PagedBatch
    slots: Tensor
    latents: Tensor
    keys: Tensor
    topk_indices: Tensor
    selects: bool

    def caches(self) -> tuple[Tensor, Tensor]:
        ckv, kpe = self.latents.split([RANK, ROPE], dim=-1)
        return ckv, kpe


def draw_layer(mode: str, by_columns: bool, indexer: bool = True, routed: bool = True) -> Layer:
    """Weights of a layer whose linear layers have this quant mode."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def linear(rows: int, k: int, parts: int = 1) -> list[ops.LinearWeights]:
        return [linear_weights(mode, rows // parts, k, torch.bfloat16, generator) for _ in range(parts)]

    def bf16(rows: int, k: int) -> list[ops.LinearWeights]:
        return [ops.LinearWeights((randn(rows, k) * k**-0.5).bfloat16())]

    def norm(size: int) -> Tensor:
        return (1 + 0.1 * randn(size)).bfloat16()

    w_uk_t, w_uv = randn(HEADS, NOPE, RANK).mul(0.1).bfloat16(), randn(HEADS, RANK, VALUES).mul(0.1).bfloat16()
    if by_columns:
        w_uk_t, w_uv = (w.mT.contiguous().mT for w in (w_uk_t, w_uv))
    keys = bf16(INDEX_DIM, HIDDEN) + bf16(INDEX_HEADS, HIDDEN)
    of_indexer = ops.IndexerWeights(
        keys, bf16(INDEX_HEADS * INDEX_DIM, Q_LORA), norm(INDEX_DIM), randn(INDEX_DIM).bfloat16(), 1e-6, True
    )
    attention = ops.MlaWeights(
        norm(HIDDEN), 1e-5, linear(Q_LORA + RANK + ROPE, HIDDEN), linear(HEADS * (NOPE + ROPE), Q_LORA),
        linear(HIDDEN, HEADS * VALUES), norm(Q_LORA), norm(RANK), 1e-6, w_uk_t, w_uv, ROPE, 0.1,
        of_indexer if indexer else None,
    )  # fmt: skip
    w13, w2 = (
        ops.ExpertWeights(torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).unbind())
        for shape in ((2 * EXPERTS, WIDTH // 2, HIDDEN), (EXPERTS, HIDDEN // 2, WIDTH))
    )
    scales = [torch.rand(EXPERTS, rows, generator=generator) * 0.01 for rows in (2 * WIDTH, HIDDEN)]
    experts = ops.RoutedExperts(
        bf16(EXPERTS, HIDDEN), randn(EXPERTS).mul(0.1), PER_TOKEN, True, 2.5, w13, scales[0], w2, scales[1], math.inf
    )
    width = 64 if mode == ops.NO_QUANT else WIDTH
    mlp = ops.MlpWeights(
        norm(HIDDEN), 1e-5, linear(2 * width, HIDDEN, 2), linear(HIDDEN, width), experts if routed else None
    )
    return Layer(attention, mlp, mode)


def draw_step(tokens: int, selects: bool, first: bool = False) -> Step:
    """A step of two requests; the last token has no slot."""
    generator = torch.Generator().manual_seed(tokens)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    starts, length = torch.tensor([0, tokens // 2, tokens], dtype=torch.int32), 20 + tokens
    lengths = torch.tensor([length, BLOCK_SIZE * 2 + 3], dtype=torch.int32)
    batch = ops.PagedBatch(starts, lengths, torch.tensor([[3, 1, 5], [0, 4, 2]], dtype=torch.int32))
    slots = torch.randperm(BLOCKS * BLOCK_SIZE, generator=generator)[:tokens]
    slots[-1] = -1
    x, residual, turns = randn(tokens, HIDDEN).bfloat16(), randn(tokens, HIDDEN).bfloat16(), randn(tokens, ROPE // 2)
    latents = randn(BLOCKS, BLOCK_SIZE, RANK + ROPE).bfloat16()
    topk_indices = torch.randint(-1, 20, (tokens, 7), generator=generator).int()
    keys = randn(BLOCKS, BLOCK_SIZE, INDEX_DIM).bfloat16()
    angles = turns.cos(), turns.sin()
    return Step(x, None if first else residual, angles, batch, slots, latents, keys, topk_indices, selects)


def in_one_call(sublayer: Any, step: Step) -> Any:
    """The attention sublayer of a step."""
    tables = ops.DecodeStep(step.batch, step.slots, step.angles, step.angles)
    keys = step.keys if sublayer.sizes[4] else None
    return sublayer(step.x, step.residual, tables, *step.caches(), keys, step.topk_indices, step.selects)


def side_by_side(x: Tensor, parts: Any) -> Tensor:
    return torch.cat([ops.int8_linear(x, part) for part in parts], dim=-1)


def attention_by_ops(w: ops.MlaWeights, step: Step) -> tuple[Tensor, Tensor]:
    """The attention sublayer of a step, op by op."""
    normed, total = ops.rms_norm(step.x, step.residual, w.norm_weight, w.norm_eps)
    (ckv, kpe), topk_indices = step.caches(), step.topk_indices
    ql_nope, q_pe, q_c = ops.mla_preprocess(
        normed, *step.angles, w.qkv_a[0], w.q_b[0], w.w_uk_t, w.q_gamma, w.kv_gamma, step.slots, ckv, kpe, w.latent_eps
    )
    if w.indexer is not None:
        i, heads = w.indexer, INDEX_HEADS if step.selects else 0
        k, weights = side_by_side(normed, i.wk_weights).split([INDEX_DIM, INDEX_HEADS], dim=-1)
        q = side_by_side(q_c, i.wq_b).view(len(normed), INDEX_HEADS, INDEX_DIM)[:, :heads]
        q = ops.indexer_preprocess(
            q, k, i.k_weight, i.k_bias, i.eps, *step.angles, i.interleaved, step.slots, step.keys
        )
        if step.selects:
            scaled = weights.float() * (INDEX_DIM**-0.5 * INDEX_HEADS**-0.5)
            topk_indices.copy_(ops.lightning_indexer(q, step.keys, scaled, step.batch, topk_indices.shape[1]))
    latent, _ = ops.sparse_flash_attention(ql_nope, q_pe, ckv, kpe, topk_indices, step.batch, w.scale, True)
    return ops.int8_linear(ops.v_up_proj(latent, w.w_uv), w.o_proj[0]), total


def mlp_by_ops(w: ops.MlpWeights, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """The MLP sublayer, op by op; routing as torch computes it."""
    normed, total = ops.rms_norm(x, residual, w.norm_weight, w.norm_eps)
    gate, up = side_by_side(normed, w.gate_up).float().chunk(2, dim=-1)
    out = ops.int8_linear((torch.nn.functional.silu(gate) * up).bfloat16(), w.down[0])
    if w.experts is not None:
        e = w.experts
        scores = side_by_side(normed, e.router).float().sigmoid()
        ids = (scores + e.correction_bias).topk(e.per_token).indices
        weights = scores.gather(1, ids)
        routed = ops.w4a8_moe(normed, weights / weights.sum(1, keepdim=True), ids, *e[5:])
        out = out + routed * e.routed_scale
    return out, total
