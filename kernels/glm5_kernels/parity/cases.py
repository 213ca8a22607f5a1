"""The inputs of the parity suite: every op, in every variant an implementation may meet; made from a seed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

from glm5_kernels.gptq import GptqInverseFactors, gptq_inverse_factors
from glm5_kernels.int8 import NO_QUANT, PER_TENSOR, PER_TOKEN, QUANT_MODES, LinearWeights
from glm5_kernels.lightning_indexer import quantize_indexer
from glm5_kernels.parity import flash
from glm5_kernels.parity.compare import Tolerance
from glm5_kernels.parity.inputs import (
    BATCHES,
    BLOCK,
    HEADS,
    HIDDEN,
    INDEX_DIM,
    INDEX_HEADS,
    NOPE,
    POOL,
    Q_LORA,
    RANK,
    ROPE,
    paged_batch,
    paged_cache,
    sums,
)
from glm5_kernels.parity.inputs import Case as Case
from glm5_kernels.sparse_flash_attention import pack_latents
from glm5_kernels.w4a8_moe import ExpertWeights

#: Tolerance of `mla_preprocess` in bf16. A division that is off by an ulp, or codes that pass through fp16 as in the
#: official kernel, round some codes the other way: an output of about 1 changes by up to 0.03, all of q_c by 1.1 %.
ROUNDED_CODES = Tolerance(
    5e-2, 2e-2, "bf16 between the steps; an int8 code near a rounding boundary may round either way", norm=1.5e-2
)
PREPROCESS_OUTPUTS = ("ql_nope", "q_pe", "q_c", "ckv_cache", "kpe_cache")
#: Where attention without rotated dims, as in GLM-5.3-Flash, is tried.
UNROTATED = ("decode", "MTP", "short and empty")
#: Attention heads of one of several ranks.
RANK_HEADS = {"prefill": 16, "chunk": 32, "mixed": 16}


def cases(seed: int = 0, ops: Collection[str] = ()) -> Iterator[Case]:
    """Yield the cases of `ops`, or of all ops; the cases of an op depend on the seed alone, not on the other ops."""
    makers: tuple[tuple[set[str], Callable[[torch.Generator], Iterator[Case]]], ...] = (
        ({"lightning_indexer", "lightning_indexer_quant"}, _indexer),
        ({"sparse_flash_attention", "sparse_flash_attention_quant"}, _attention),
        ({"mla_preprocess"}, _preprocess),
        ({"v_up_proj"}, _up_projection),
        ({"int8_linear"}, _linear),
        ({"w4a8_moe"}, _experts),
        ({"hadamard"}, _rotation),
        ({"ssz_scale", "round_rows", "fake_round"}, _rounding),
        ({"gptq_inverse_factors", "gptq_round"}, _gptq),
        ({"indexer_preprocess"}, _index_operands),  # the newest are last: the seeds of the others stay
        ({"rms_norm"}, _norms),
        *flash.MAKERS,
    )
    for number, (names, make) in enumerate(makers):
        if not ops or names & set(ops):
            op_cases = make(torch.Generator().manual_seed(1000 * seed + number))
            yield from (case for case in op_cases if not ops or case.op in ops)


def _indexer(generator: torch.Generator) -> Iterator[Case]:
    for name, requests in BATCHES.items():
        for dtype in (torch.bfloat16, torch.float32):
            batch = paged_batch(requests, generator)
            tokens = int(batch.query_start_loc[-1])
            q = torch.randn(tokens, INDEX_HEADS, INDEX_DIM, generator=generator).to(dtype)
            weights = torch.randn(tokens, INDEX_HEADS, generator=generator).to(dtype)
            keys = paged_cache(batch.block_table, INDEX_DIM, dtype, generator)
            for topk in (64, 2048):
                arguments = (q, keys, weights, batch, topk)
                yield Case("lightning_indexer", f"{name}, {str(dtype)[6:]}, top {topk}", arguments, gap=1e-3)
            variant = f"{name}, {str(dtype)[6:]}, top 64, pools of {POOL}"
            yield Case("lightning_indexer", variant, (q, keys, weights, batch, 64, POOL), gap=1e-3)
        (query, q_scale), (stored, k_scale) = quantize_indexer(q), quantize_indexer(keys)
        quantized = (query, stored, weights.half(), q_scale, k_scale, batch, 64)
        yield Case("lightning_indexer_quant", f"{name}, int8, top 64", quantized, gap=1e-3)


def _attention(generator: torch.Generator) -> Iterator[Case]:
    for name, requests in BATCHES.items():
        for dtype, rounded, joined in (
            (torch.bfloat16, False, True),
            (torch.bfloat16, True, True),
            (torch.bfloat16, True, False),
            (torch.float32, False, True),
        ):
            batch = paged_batch(requests, generator)
            tokens, heads = int(batch.query_start_loc[-1]), RANK_HEADS.get(name, HEADS)
            fused = paged_cache(batch.block_table, RANK + ROPE, dtype, generator)
            nope = (0.3 * torch.randn(tokens, heads, RANK, generator=generator)).to(dtype)
            pe = (0.3 * torch.randn(tokens, heads, ROPE, generator=generator)).to(dtype)
            order = [torch.randperm(int(batch.seq_lens.max()) + 1, generator=generator) for _ in range(tokens)]
            selected = torch.nn.functional.pad(torch.stack(order)[:, :256].int(), (0, 8), value=-1)
            caches = fused[..., :RANK], fused[..., RANK:]
            if not joined:
                caches = caches[0].contiguous(), caches[1].contiguous()
            arguments = nope, pe, *caches, selected, batch, 0.0625, rounded
            values = sums(dtype, RANK)
            if rounded:
                values = Tolerance(2e-2, 2e-2, "probabilities rounded to bf16 before or after they are normalised")
            outputs = ("out", values), ("lse", Tolerance(2e-5, 1e-5, "fp32 sums and logarithm"))
            variant = f"{name}, {str(dtype)[6:]}" + (", bf16 P" if rounded else "")
            where = ", one cache" if joined else ", two caches"
            yield Case("sparse_flash_attention", variant + where, arguments, outputs)
            if not joined:
                continue
            if not rounded and name in UNROTATED:
                latents = nope, nope[..., :0], fused[..., :RANK].contiguous(), fused[..., :0], *arguments[4:]
                yield Case("sparse_flash_attention", variant + ", no rotation", latents, outputs)
            packed = nope, pe, pack_latents(fused[..., :RANK], fused[..., RANK:]), *arguments[4:]
            yield Case("sparse_flash_attention_quant", f"{variant}, int8 rows", packed, outputs)


def linear_weights(mode: str, n: int, k: int, dtype: torch.dtype, generator: torch.Generator) -> LinearWeights:
    """Random weights [n, k] of a linear layer in one of `QUANT_MODES`."""
    if mode == NO_QUANT:
        return LinearWeights((torch.randn(n, k, generator=generator) * k**-0.5).to(dtype))
    weight = torch.randint(-127, 128, (n, k), dtype=torch.int8, generator=generator)
    scale = torch.rand(n, generator=generator) * 0.02 * k**-0.5 + 1e-4
    if mode == PER_TOKEN:
        return LinearWeights(weight, mode, scale)
    step, offset = torch.tensor([0.03125]), torch.tensor([3.0])
    bias = (-3 * weight.long().sum(1)).int()
    return LinearWeights(weight, PER_TENSOR, scale * step, step, offset, bias)


def preprocess_operands(
    mode: str,
    dtype: torch.dtype,
    tokens: int,
    generator: torch.Generator,
    heads: int = HEADS,
    q_lora: int = Q_LORA,
    hidden: int = HIDDEN,
    rope: int = ROPE,
) -> tuple[Any, ...]:
    """Operands of `mla_preprocess`; the first of several tokens is padding."""
    slots = torch.randperm(2 * BLOCK, generator=generator)[:tokens]
    slots[0] = -1 if tokens > 1 else slots[0]
    angle = torch.rand(tokens, rope // 2, generator=generator) * 6
    fused = torch.zeros(2, BLOCK, RANK + rope, dtype=dtype)
    return (
        torch.randn(tokens, hidden, generator=generator).to(dtype), angle.cos(), angle.sin(),
        linear_weights(mode, q_lora + RANK + rope, hidden, dtype, generator),
        linear_weights(mode, heads * (NOPE + rope), q_lora, dtype, generator),
        (torch.randn(heads, NOPE, RANK, generator=generator) * NOPE**-0.5).to(dtype),
        0.9 + 0.2 * torch.rand(q_lora, generator=generator), 0.9 + 0.2 * torch.rand(RANK, generator=generator),
        slots, fused[..., :RANK], fused[..., RANK:], 1e-6,
    )  # fmt: skip


def _preprocess(generator: torch.Generator) -> Iterator[Case]:
    dtypes = torch.float32, torch.bfloat16
    variants = [(*variant, ROPE) for variant in itertools.product(QUANT_MODES, dtypes, (1, 8, 40))]
    variants += [(*variant, 8, 0) for variant in itertools.product(QUANT_MODES, dtypes)]
    for mode, dtype, tokens, rope in variants:
        allowed = ROUNDED_CODES if dtype == torch.bfloat16 else sums(dtype, HIDDEN)
        outputs = tuple((name, allowed) for name in PREPROCESS_OUTPUTS)
        arguments = preprocess_operands(mode, dtype, tokens, generator, rope=rope)
        variant = f"{mode}, {str(dtype)[6:]}, {tokens} tokens" + ("" if rope else ", no rotation")
        yield Case("mla_preprocess", variant, arguments, outputs)


def _index_operands(generator: torch.Generator) -> Iterator[Case]:
    for dtype in (torch.float32, torch.bfloat16):
        for tokens, interleaved in ((1, True), (8, True), (70, True), (8, False)):
            slots = torch.randperm(2 * BLOCK, generator=generator)[:tokens]
            slots[0] = -1 if tokens > 1 else slots[0]  # padding
            angle = torch.rand(tokens, ROPE // 2, generator=generator) * 6
            projected = torch.randn(tokens, INDEX_DIM + INDEX_HEADS, generator=generator).to(dtype)
            arguments = (
                torch.randn(tokens, INDEX_HEADS, INDEX_DIM, generator=generator).to(dtype), projected[:, :INDEX_DIM],
                torch.rand(INDEX_DIM, generator=generator), torch.randn(INDEX_DIM, generator=generator), 1e-6,
                angle.cos(), angle.sin(), interleaved, slots, torch.zeros(2, BLOCK, INDEX_DIM, dtype=dtype),
            )  # fmt: skip
            outputs = tuple((name, sums(dtype, INDEX_DIM)) for name in ("q", "k_cache"))
            variant = f"{str(dtype)[6:]}, {tokens} tokens, {'pairs' if interleaved else 'halves'}"
            yield Case("indexer_preprocess", variant, arguments, outputs)


def _norms(generator: torch.Generator) -> Iterator[Case]:
    for dtype, tokens, added in itertools.product((torch.float32, torch.bfloat16), (1, 8, 70), (True, False)):
        x, residual = (torch.randn(tokens, HIDDEN, generator=generator).to(dtype) for _ in range(2))
        weight = (torch.rand(HIDDEN, generator=generator) + 0.5).to(dtype)
        ulp = torch.finfo(dtype).eps
        normed = Tolerance(0.0, 2e-6 if dtype == torch.float32 else 2 * ulp, "squares added in another order, two ULP")
        outputs = ("out", normed), ("residual", Tolerance(0.0, 0.0, "one addition, one rounding"))
        variant = f"{str(dtype)[6:]}, {tokens} tokens" + (", residual" if added else "")
        yield Case("rms_norm", variant, (x, residual if added else None, weight, 1e-5), outputs)


def _up_projection(generator: torch.Generator) -> Iterator[Case]:
    for dtype, tokens in itertools.product((torch.float32, torch.bfloat16), (1, 8, 40)):
        latent = torch.randn(tokens, HEADS, RANK, generator=generator).to(dtype)
        w_uv = (torch.randn(HEADS, RANK, 256, generator=generator) * 0.05).to(dtype)
        outputs = (("values", sums(dtype, RANK)),)
        yield Case("v_up_proj", f"{str(dtype)[6:]}, {tokens} tokens", (latent, w_uv), outputs)


def _linear(generator: torch.Generator) -> Iterator[Case]:
    exact = Tolerance(0.0, 0.0, "integers are exact, one rounding")
    for mode in (PER_TOKEN, PER_TENSOR):
        for tokens, n, k in ((1, 640, 512), (8, 200, 2048), (300, 256, 96)):
            x, w = torch.randn(tokens, k, generator=generator), linear_weights(mode, n, k, torch.float32, generator)
            yield Case("int8_linear", f"{mode}, [{tokens}, {k}] x [{n}, {k}]", (x, w), (("y", exact),))


def _experts(generator: torch.Generator) -> Iterator[Case]:
    for (name, dtype), tokens in itertools.product((("INT4", torch.uint8), ("INT8", torch.int8)), (1, 8, 100)):
        per, limits = (2, (0, 256)) if name == "INT4" else (1, (-128, 128))  # rows in a byte
        w13, w2 = (
            ExpertWeights(torch.randint(*limits, shape, dtype=dtype, generator=generator).unbind())
            for shape in ((2 * 8, 128 // per, 192), (8, 192 // per, 128))
        )
        ids = torch.randint(-1, 8, (tokens, 4), generator=generator)
        arguments = (
            torch.randn(tokens, 192, generator=generator), torch.rand(tokens, 4, generator=generator), ids,
            w13, torch.rand(8, 256, generator=generator) * 0.02, w2, torch.rand(8, 192, generator=generator) * 0.02,
        )  # fmt: skip
        allowed = Tolerance(1e-5, 1e-5, "exact integers; expert outputs added in fp32")
        for limit in (math.inf, 0.5):
            variant = f"{name}, {tokens} tokens, 4 of 8 experts, SwiGLU limited to {limit}"
            yield Case("w4a8_moe", variant, (*arguments, limit), (("out", allowed),))


def _rotation(generator: torch.Generator) -> Iterator[Case]:
    for size, shape, dim in ((6144, (4, 6144), 1), (512, (20, 1024), 1), (32, (64, 48), 0), (6144, (6144, 16), 0)):
        arguments = torch.randn(shape, generator=generator), torch.randn(size, generator=generator), dim
        allowed = Tolerance(1e-4, 1e-5, f"{size} terms in fp32, butterflies or products")
        yield Case("hadamard", f"size {size}, dim {dim}", arguments, (("result", allowed), ("x", allowed)))


def _rounding(generator: torch.Generator) -> Iterator[Case]:
    exact = Tolerance(0.0, 0.0, "the same integers")
    sums = Tolerance(0.0, 1e-5, "squares added in another order")
    lattice = torch.randint(-7, 8, (64, 400), generator=generator) * (torch.rand(64, 1, generator=generator) + 0.1)
    grid = torch.linspace(0.2, 1.0, 24)
    fitted = Tolerance(0.0, 1e-6, "sums in another order; weights that a scale meets exactly have one best scale")
    yield Case("ssz_scale", "INT4", (lattice, 7, 8, grid), (("scale", fitted),))
    for bits in (4, 8):
        weight = torch.randn(64, 400, generator=generator)
        scale = weight.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1) * 0.8
        outputs = ("stored", exact), ("sums", exact), ("squared_error", sums), ("squared_weight", sums)
        yield Case("round_rows", f"INT{bits}", (weight, scale, bits, 4), outputs)
        factor = torch.rand(400, generator=generator) + 0.5
        yield Case("fake_round", f"INT{bits}", (weight, factor, 2 ** (bits - 1) - 1, 0), (("w", exact),))


def _gptq(generator: torch.Generator) -> Iterator[Case]:
    """Small: a weight half way between two integers may go either way, and changes the columns after it."""
    exact = Tolerance(0.0, 0.0, "the same integers")
    sums = Tolerance(1e-6, 1e-4, "sums in another order")
    inputs = (torch.randn(24, 64, generator=generator) @ torch.randn(64, 64, generator=generator)).T.contiguous() / 8
    yield Case("gptq_inverse_factors", "64 columns, 24 inputs", (inputs, 0.5), (("factors", sums),))
    factors = gptq_inverse_factors(GptqInverseFactors(inputs, 0.5))
    for bits, passes, refit in ((4, 0, False), (4, 1, True), (8, 1, False)):
        weight, largest = torch.randn(16, 64, generator=generator), 2 ** (bits - 1) - 1
        scale = weight.abs().amax(1, keepdim=True) / largest
        perm = torch.randperm(64, generator=generator)
        arguments = weight, scale, largest, perm, inputs, factors, 0.5, passes, refit
        outputs = ("integers", exact), ("scale", sums)
        yield Case("gptq_round", f"INT{bits}, {passes} passes of descent", arguments, outputs)
