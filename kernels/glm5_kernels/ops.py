"""The kernels as typed Python functions; `registry` selects the implementation.

Everything outside `glm5_kernels` imports this module or, where torch must not load, `registry`, and no other of the
package (but the tests of the kernels). What a server calls is also `torch.ops.glm5_ascend.<name>` (`library`). Maths,
shapes and errors stand in the op's package, e.g. `glm5_kernels.lightning_indexer`.
"""

from __future__ import annotations

import torch

from glm5_kernels.errors import KernelInputError, KernelUnavailableError
from glm5_kernels.int8 import NO_QUANT, PER_TENSOR, PER_TOKEN, LinearWeights, quantize_per_token
from glm5_kernels.library import run
from glm5_kernels.lightning_indexer.reference import quantize_indexer
from glm5_kernels.paged_cache import PagedBatch, keys_in_pages, queries_in_a_row, write_rows
from glm5_kernels.parity.run import ParityRow, parity
from glm5_kernels.registry import choose, report
from glm5_kernels.registry import function as _function
from glm5_kernels.sparse_flash_attention.reference import pack_latents
from glm5_kernels.warm_up import compile_all

__all__ = [
    "NO_QUANT",
    "PER_TENSOR",
    "PER_TOKEN",
    "KernelInputError",
    "KernelUnavailableError",
    "LinearWeights",
    "PagedBatch",
    "ParityRow",
    "choose",
    "compile_all",
    "fake_round",
    "gptq_inverse_factors",
    "gptq_round",
    "hadamard",
    "indexer_preprocess",
    "int8_linear",
    "keys_in_pages",
    "lightning_indexer",
    "lightning_indexer_quant",
    "mla_preprocess",
    "pack_latents",
    "parity",
    "quantize_indexer",
    "quantize_per_token",
    "queries_in_a_row",
    "report",
    "round_rows",
    "sparse_flash_attention",
    "sparse_flash_attention_quant",
    "ssz_scale",
    "v_up_proj",
    "w4a8_moe",
    "widens_bf16",
    "write_rows",
]

Tensor = torch.Tensor


def lightning_indexer(
    q: Tensor,
    k_cache: Tensor,
    weights: Tensor,
    batch: PagedBatch,
    topk: int,
) -> Tensor:
    """The `topk` best visible positions of each query token: int32 [T, topk], ascending, then -1."""
    out: Tensor = run("lightning_indexer", q, k_cache, weights, batch, topk)
    return out


def lightning_indexer_quant(
    q: Tensor,
    k_cache: Tensor,
    weights: Tensor,
    q_scale: Tensor,
    k_scale_cache: Tensor,
    batch: PagedBatch,
    topk: int,
) -> Tensor:
    """`lightning_indexer` on int8 queries and keys with their scales (`quantize_indexer`)."""
    out: Tensor = run("lightning_indexer_quant", q, k_cache, weights, q_scale, k_scale_cache, batch, topk)
    return out


def sparse_flash_attention(
    ql_nope: Tensor,
    q_pe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    topk_indices: Tensor,
    batch: PagedBatch,
    scale: float,
    round_probs: bool = False,
) -> tuple[Tensor, Tensor]:
    """Absorbed attention over the chosen positions: out [T, H, kv_lora_rank] and lse fp32 [T, H]."""
    out: tuple[Tensor, Tensor] = run(
        "sparse_flash_attention", ql_nope, q_pe, ckv_cache, kpe_cache, topk_indices, batch, scale, round_probs
    )
    return out


def sparse_flash_attention_quant(
    ql_nope: Tensor,
    q_pe: Tensor,
    kv_cache: Tensor,
    topk_indices: Tensor,
    batch: PagedBatch,
    scale: float,
    round_probs: bool = False,
) -> tuple[Tensor, Tensor]:
    """`sparse_flash_attention` on a cache of packed int8 rows (`pack_latents`)."""
    out: tuple[Tensor, Tensor] = run(
        "sparse_flash_attention_quant", ql_nope, q_pe, kv_cache, topk_indices, batch, scale, round_probs
    )
    return out


def mla_preprocess(
    hidden_states: Tensor,
    cos: Tensor,
    sin: Tensor,
    qkv_a: LinearWeights,
    q_b: LinearWeights,
    w_uk_t: Tensor,
    q_a_gamma: Tensor,
    kv_a_gamma: Tensor,
    slot_mapping: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """ql_nope [T, H, kv_lora_rank], q_pe [T, H, rope], q_c [T, q_lora_rank]; writes both caches."""
    out: tuple[Tensor, Tensor, Tensor] = run(
        "mla_preprocess",
        hidden_states,
        cos,
        sin,
        qkv_a,
        q_b,
        w_uk_t,
        q_a_gamma,
        kv_a_gamma,
        slot_mapping,
        ckv_cache,
        kpe_cache,
        eps,
    )
    return out


def indexer_preprocess(
    q: Tensor,
    k: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    slot_mapping: Tensor,
    k_cache: Tensor,
) -> Tensor:
    """The index queries rotated, [T, H, D]; writes the normed and rotated keys of k [T, D] into the cache."""
    out: Tensor = run(
        "indexer_preprocess", q, k, norm_weight, norm_bias, eps, cos, sin, interleaved, slot_mapping, k_cache
    )
    return out


def v_up_proj(latent: Tensor, w_uv: Tensor) -> Tensor:
    """latent [T, H, kv_lora_rank] times w_uv [H, kv_lora_rank, v_head_dim] -> [T, H * v_head_dim] in the same dtype."""
    out: Tensor = run("v_up_proj", latent, w_uv)
    return out


def int8_linear(x: Tensor, w: LinearWeights) -> Tensor:
    """x [..., K] times the quantized weight [N, K] transposed -> [..., N] in x's dtype."""
    out: Tensor = run("int8_linear", x, w)
    return out


def widens_bf16() -> bool:
    """True if `int8_linear` multiplies an unquantized bf16 weight in fp32, because torch has no fast bf16 product."""
    if choose("int8_linear").implementation != "cpu":
        return False
    from glm5_kernels.compiled import bf16_linear

    return not bf16_linear.ONEDNN_MULTIPLIES


def w4a8_moe(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
) -> Tensor:
    """The routed experts' share of the output, [T, D] in x's dtype."""
    out: Tensor = run("w4a8_moe", x, topk_weights, topk_ids, w13, w13_scale, w2, w2_scale)
    return out


def hadamard(x: Tensor, weight: Tensor, dim: int = 1) -> Tensor:
    """x fp32 [rows, columns] times weight [n] times the Hadamard matrix of size n along `dim`, in place."""
    out: Tensor = _function("hadamard", x.device.type)(x, weight, dim)
    return out


def ssz_scale(weight: Tensor, largest: int, steps: int, grid: Tensor) -> Tensor:
    """The scale [N, 1] of each row of weight fp32 [N, K] at which rounding loses least."""
    out: Tensor = _function("ssz_scale", weight.device.type)(weight, largest, steps, grid)
    return out


def round_rows(weight: Tensor, scale: Tensor, bits: int, parts: int = 1) -> tuple[Tensor, Tensor, float, float]:
    """Integers of weight fp32 [N, K] as stored, their sums [N, parts], sum of squared errors, sum of squares."""
    out: tuple[Tensor, Tensor, float, float] = _function("round_rows", weight.device.type)(weight, scale, bits, parts)
    return out


def fake_round(weight: Tensor, factor: Tensor, largest: int, steps: int = 0) -> Tensor:
    """weight fp32 [N, K] times factor [K] after rounding, as integers times scales: fp32 [N, K]."""
    out: Tensor = _function("fake_round", weight.device.type)(weight, factor, largest, steps)
    return out


def gptq_inverse_factors(inputs: Tensor, damping: float) -> Tensor:
    """The factors of GPTQ's update by the inverse Hessian, for inputs fp32 [K, n]: fp32 [K, n]."""
    out: Tensor = _function("gptq_inverse_factors", inputs.device.type)(inputs, damping)
    return out


def gptq_round(
    weight: Tensor,
    scale: Tensor,
    largest: int,
    perm: Tensor,
    inputs: Tensor,
    hinv_factors: Tensor,
    damping: float,
    passes: int,
    refit: bool,
) -> tuple[Tensor, Tensor]:
    """Integers (fp32 [N, K]) and scale [N, 1] of weight fp32 [N, K] that keep its outputs on inputs [K, n]."""
    function = _function("gptq_round", weight.device.type)
    out: tuple[Tensor, Tensor] = function(weight, scale, largest, perm, inputs, hinv_factors, damping, passes, refit)
    return out
