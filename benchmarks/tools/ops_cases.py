"""The cases of bench_ops.py: each op at GLM-5's shapes, with the baseline it is measured against."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from glm5_kernels import registry
from glm5_kernels.ops import PER_TOKEN, ExpertWeights, LinearWeights, PagedBatch
from glm5_kernels.parity.flash import mhc_operands

HEADS, RANK, ROPE, NOPE, HIDDEN, Q_LORA = 64, 512, 64, 192, 6144, 2048
FLASH_HIDDEN = 4096
INDEX_HEADS, INDEX_DIM, TOPK, BLOCK = 32, 128, 2048, 128
EXPERTS, PER_EXPERT = 24, 2048
FLOATS, INTEGERS = (torch.float32, torch.bfloat16), (torch.int8,)


@dataclass
class Case:
    """One op at one shape.

    Attributes:
        difference: of the compiled result from the reference's, not above `limit`.
        operations: multiplications and additions, with the types of the products that they could be done with.
        baseline: what the compiled op is measured against; None is the reference.
    """

    op: str
    shape: str
    operands: tuple[Any, ...]
    difference: Callable[[Any, Any], float]
    limit: float
    bytes: float
    operations: Sequence[tuple[float, tuple[torch.dtype, ...]]]
    baseline: Callable[[], Any] | None = None

    def fast(self) -> Any:
        """The compiled op."""
        return registry.load(self.op, "cpu")(*self.operands)

    def exact(self) -> Any:
        """The reference."""
        return registry.load(self.op, "reference")(*self.operands)

    def plain(self) -> Any:
        return self.exact() if self.baseline is None else self.baseline()

    def check(self) -> float:
        return self.difference(self.fast(), self.exact())


def batch(requests: int, tokens: int, context: int) -> PagedBatch:
    """Equal requests in shuffled blocks."""
    blocks = torch.randperm(requests * context // BLOCK).view(requests, -1).int()
    return PagedBatch(torch.arange(requests + 1).int() * tokens, torch.full((requests,), context).int(), blocks)


def missed(got: torch.Tensor, want: torch.Tensor) -> float:
    """Share of the reference's choice that is not in `got`."""
    lost = sum(len(set(a) - set(b)) for a, b in zip(want.tolist(), got.tolist(), strict=True))
    return lost / max(int((want >= 0).sum()), 1)


def relative(got: Any, want: Any) -> float:
    """Relative error of the first output."""
    a, b = (x[0].float() if isinstance(x, tuple) else x.float() for x in (got, want))
    return float((a - b).norm() / b.norm())


def indexer(requests: int, tokens: int, context: int) -> Case:
    cache = torch.randn(requests * context // BLOCK, BLOCK, INDEX_DIM).bfloat16()
    q = torch.randn(requests * tokens, INDEX_HEADS, INDEX_DIM).bfloat16()
    w = torch.randn(requests * tokens, INDEX_HEADS).bfloat16()
    operands = q, cache, w, batch(requests, tokens, context), TOPK
    pairs = requests * tokens * (context - (tokens - 1) / 2)
    work = 2.0 * pairs * INDEX_HEADS * INDEX_DIM, FLOATS
    shape = f"B={requests} n={tokens} ctx={context}"
    return Case("lightning_indexer", shape, operands, missed, 1e-3, 2.0 * requests * context * INDEX_DIM, [work])


def attention(requests: int, tokens: int, context: int) -> Case:
    """Probabilities are rounded, as an NPU does."""
    cache = torch.randn(requests * context // BLOCK, BLOCK, RANK + ROPE).bfloat16()
    count = requests * tokens
    nope, rope = (torch.randn(count, HEADS, RANK) * 0.2).bfloat16(), (torch.randn(count, HEADS, ROPE) * 0.2).bfloat16()
    selected = torch.stack([torch.randperm(context - tokens)[:TOPK] for _ in range(count)]).int()
    where = selected, batch(requests, tokens, context), HEADS**-0.5 / 2, True
    operands = nope, rope, cache[..., :RANK], cache[..., RANK:], *where
    keys = count * min(TOPK, context - tokens)
    scores = 2.0 * keys * HEADS * (RANK + ROPE), FLOATS
    values = 2.0 * keys * HEADS * RANK, FLOATS
    shape = f"B={requests} n={tokens} ctx={context}"
    bytes_read = 2.0 * keys * (RANK + ROPE)
    return Case("sparse_flash_attention", shape, operands, relative, 1e-2, bytes_read, [scores, values])


def kda(sequences: int, tokens: int) -> Case:
    """GLM-5.3-Flash's heads, in place. Nothing decays and nothing is learnt: every call computes the same."""
    count, heads = sequences * tokens, (HEADS, INDEX_DIM)
    q, k, v = (torch.randn(count, *heads).bfloat16() for _ in range(3))
    states, slots = torch.randn(sequences, *heads, INDEX_DIM), torch.arange(sequences).int()
    written = torch.full((sequences, tokens), -1).int()
    written[:, -1] = slots
    starts = torch.arange(sequences + 1).int() * tokens
    operands = q, k, v, torch.zeros(count, *heads), torch.zeros(count, HEADS), states, starts, slots, written.flatten()
    work = 6.0 * count * HEADS * INDEX_DIM**2, FLOATS[:1]  # the sum that is read, the rank-one update, the output
    return Case("kda", f"B={sequences} n={tokens}", operands, relative, 1e-2, 2.0 * 4 * states.numel(), [work])


def residual_streams(tokens: int) -> Case:
    """A half layer of GLM-5.3-Flash: 4 streams of 4096."""
    streams, *others = mhc_operands(tokens, 4, FLASH_HIDDEN, torch.bfloat16, True, torch.Generator().manual_seed(0))
    operands, row = (streams.float(), *others), 4 * FLASH_HIDDEN
    work = 2.0 * tokens * row * (24 + 4 + 1), FLOATS[:1]  # the maps, the mixing, the reading
    return Case("mhc", f"T={tokens}", operands, relative, 1e-5, 4.0 * row * (24 + 2 * tokens), [work])


def linear(n: int, k: int) -> LinearWeights:
    return LinearWeights(torch.randint(-127, 128, (n, k), dtype=torch.int8), PER_TOKEN, torch.rand(n) * 1e-3)


def preprocess(tokens: int) -> Case:
    """At GLM-5's sizes: int8 weights except W_UK, which is bf16 like activations and caches."""
    qkv_a, q_b = linear(Q_LORA + RANK + ROPE, HIDDEN), linear(HEADS * (NOPE + ROPE), Q_LORA)
    slots, pairs = -(-tokens // BLOCK), ROPE // 2
    x, cos, sin = torch.randn(tokens, HIDDEN).bfloat16(), torch.randn(tokens, pairs), torch.randn(tokens, pairs)
    w_uk_t, gammas = (torch.randn(HEADS, NOPE, RANK) * 0.05).bfloat16(), (torch.ones(Q_LORA), torch.ones(RANK))
    ckv, kpe = torch.zeros(slots, BLOCK, RANK).bfloat16(), torch.zeros(slots, BLOCK, ROPE).bfloat16()
    where = torch.arange(tokens)
    operands = x, cos, sin, qkv_a, q_b, w_uk_t, *gammas, where, ckv, kpe, 1e-5
    floats = [LinearWeights(w.weight.float() * w.scale[:, None]) for w in (qkv_a, q_b) if w.scale is not None]
    widened = x.float(), cos, sin, *floats, w_uk_t.float(), *gammas, where, ckv.float(), kpe.float(), 1e-5
    plain = lambda: registry.load("mla_preprocess", "reference")(*widened)  # noqa: E731
    absorbed = 2.0 * tokens * HEADS * NOPE * RANK
    products = [(2.0 * tokens * w.weight.numel(), INTEGERS) for w in (qkv_a, q_b)]
    bytes_read = sum(w.weight.numel() for w in (qkv_a, q_b)) + 2.0 * HEADS * NOPE * RANK
    work = [*products, (absorbed, FLOATS)]
    return Case("mla_preprocess", f"W8A8_DYNAMIC T={tokens}", operands, relative, 1e-2, bytes_read, work, plain)


def expert_operands(tokens: int, experts: int) -> tuple[Any, ...]:
    """Packed INT4 experts of GLM-5's size, of which each token takes 8."""
    x, weights = torch.randn(tokens, HIDDEN), torch.rand(tokens, 8)
    ids = torch.stack([torch.randperm(experts)[:8] for _ in range(tokens)])
    w13, w2 = (
        ExpertWeights(torch.randint(0, 256, shape, dtype=torch.uint8).unbind())
        for shape in ((2 * experts, PER_EXPERT // 2, HIDDEN), (experts, HIDDEN // 2, PER_EXPERT))
    )
    scales = torch.rand(experts, 2 * PER_EXPERT) * 1e-2, torch.rand(experts, HIDDEN) * 1e-2
    return x, weights, ids, w13, scales[0], w2, scales[1]


def experts(tokens: int) -> Case:
    """8 of 24 experts per token, against fp32."""
    operands = expert_operands(tokens, EXPERTS)
    x, weights, selected, w13, s13, w2, s2 = operands
    used = sorted(set(selected.flatten().tolist()))
    wide = {e: torch.cat([w13.codes(2 * e), w13.codes(2 * e + 1)]) * s13[e, :, None] for e in used}
    narrow = {e: w2.codes(e) * s2[e, :, None] for e in used}
    routed = {e: torch.where(selected == e) for e in used}

    def plain() -> torch.Tensor:
        out = torch.zeros(tokens, HIDDEN)
        for e in used:
            token, slot = routed[e]
            gate, up = F.linear(x[token], wide[e]).chunk(2, -1)
            y = F.linear(F.silu(gate) * up, narrow[e])
            out.index_add_(0, token, y * weights[token, slot, None])
        return out

    return _expert_case(f"{tokens} tokens", operands, plain)


def packed_experts(tokens: int) -> Case:
    """8 of 32 experts per token, against the same weights as one byte per code."""
    operands = expert_operands(tokens, 32)
    *routed, w13, s13, w2, s2 = operands
    bytes13, bytes2 = (ExpertWeights([w.codes(number) for number in range(len(w.blocks))]) for w in (w13, w2))
    plain = lambda: registry.load("w4a8_moe", "cpu")(*routed, bytes13, s13, bytes2, s2)  # noqa: E731
    return _expert_case(f"{tokens} tokens, packed", operands, plain)


def _expert_case(shape: str, operands: tuple[Any, ...], plain: Callable[[], Any]) -> Case:
    selected, size = operands[2], 3.0 * PER_EXPERT * HIDDEN
    work, used = [(2 * size * selected.numel(), INTEGERS)], len(selected.unique())
    return Case("w4a8_moe", shape, operands, relative, 1e-5, size / 2 * used, work, plain)


def product(tokens: int, n: int, k: int) -> Case:
    x, w = torch.randn(tokens, k), linear(n, k)
    assert w.scale is not None
    wide = w.weight.float() * w.scale[:, None]
    plain = lambda: F.linear(x, wide)  # noqa: E731
    differs = lambda got, want: float(not torch.equal(got, want))  # noqa: E731
    work = [(2.0 * tokens * n * k, INTEGERS)]
    return Case("int8_linear", f"{tokens}x{n}x{k}", (x, w), differs, 0.0, float(n * k), work, plain)


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
