"""The one door to the kernels: typed Python functions; which implementation answers is `registry`'s business.

Everything outside `glm5_kernels` imports this module and no other of the package (but the tests of the kernels). The
three attention ops are also `torch.ops.glm5_ascend.<name>` for every device, so that profilers, dispatch modes and
compiled graphs see each as one op. Maths, shapes and errors stand in the op's package, e.g.
`glm5_kernels.lightning_indexer`.
"""

from __future__ import annotations

import torch

from glm5_kernels.errors import KernelInputError, KernelUnavailableError
from glm5_kernels.int8 import NO_QUANT, PER_TENSOR, PER_TOKEN, LinearWeights
from glm5_kernels.lightning_indexer.reference import quantize_indexer
from glm5_kernels.paged import write_rows
from glm5_kernels.parity.run import Row, parity
from glm5_kernels.registry import choose, names, report
from glm5_kernels.registry import function as _function
from glm5_kernels.sparse_flash_attention.reference import pack_latents

__all__ = [
    "NO_QUANT",
    "PER_TENSOR",
    "PER_TOKEN",
    "KernelInputError",
    "KernelUnavailableError",
    "LinearWeights",
    "Row",
    "choose",
    "fake_round",
    "hadamard",
    "int8_linear",
    "lightning_indexer",
    "lightning_indexer_quant",
    "mla_preprocess",
    "names",
    "pack_latents",
    "parity",
    "quantize_indexer",
    "report",
    "round_rows",
    "sparse_flash_attention",
    "sparse_flash_attention_quant",
    "ssz_scale",
    "w4a8_moe",
    "write_rows",
]

Tensor = torch.Tensor


@torch.library.custom_op("glm5_ascend::lightning_indexer", mutates_args=())
def _lightning_indexer_op(
    q: Tensor,
    k_cache: Tensor,
    weights: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    topk: int,
) -> Tensor:
    out: Tensor = _function("lightning_indexer", q.device.type)(
        q, k_cache, weights, query_start_loc, seq_lens, block_table, topk
    )
    return out


@_lightning_indexer_op.register_fake
def _(
    q: Tensor,
    k_cache: Tensor,
    weights: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    topk: int,
) -> Tensor:
    return q.new_empty((q.shape[0], topk), dtype=torch.int32)


def lightning_indexer(
    q: Tensor,
    k_cache: Tensor,
    weights: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    topk: int,
) -> Tensor:
    """The `topk` best visible positions of each query token: int32 [T, topk], best first, then -1."""
    out: Tensor = _lightning_indexer_op(q, k_cache, weights, query_start_loc, seq_lens, block_table, topk)
    return out


@torch.library.custom_op("glm5_ascend::sparse_flash_attention", mutates_args=())
def _sparse_flash_attention_op(
    ql_nope: Tensor,
    q_pe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    topk_indices: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    scale: float,
    round_probs: bool,
) -> tuple[Tensor, Tensor]:
    out: tuple[Tensor, Tensor] = _function("sparse_flash_attention", ql_nope.device.type)(
        ql_nope,
        q_pe,
        ckv_cache,
        kpe_cache,
        topk_indices,
        query_start_loc,
        seq_lens,
        block_table,
        scale,
        round_probs,
    )
    return out


@_sparse_flash_attention_op.register_fake
def _(
    ql_nope: Tensor,
    q_pe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    topk_indices: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    scale: float,
    round_probs: bool,
) -> tuple[Tensor, Tensor]:
    out = ql_nope.new_empty(ql_nope.shape)
    return out, ql_nope.new_empty(ql_nope.shape[:2], dtype=torch.float32)


def sparse_flash_attention(
    ql_nope: Tensor,
    q_pe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    topk_indices: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    scale: float,
    round_probs: bool = False,
) -> tuple[Tensor, Tensor]:
    """Absorbed attention over the chosen positions: out [T, H, kv_lora_rank] and lse fp32 [T, H]."""
    out: tuple[Tensor, Tensor] = _sparse_flash_attention_op(
        ql_nope,
        q_pe,
        ckv_cache,
        kpe_cache,
        topk_indices,
        query_start_loc,
        seq_lens,
        block_table,
        scale,
        round_probs,
    )
    return out


def lightning_indexer_quant(
    q: Tensor,
    k_cache: Tensor,
    weights: Tensor,
    q_scale: Tensor,
    k_scale_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    topk: int,
) -> Tensor:
    """`lightning_indexer` on int8 queries and keys with their scales (`quantize_indexer`)."""
    out: Tensor = _function("lightning_indexer_quant", q.device.type)(
        q, k_cache, weights, q_scale, k_scale_cache, query_start_loc, seq_lens, block_table, topk
    )
    return out


def sparse_flash_attention_quant(
    ql_nope: Tensor,
    q_pe: Tensor,
    kv_cache: Tensor,
    topk_indices: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    scale: float,
    round_probs: bool = False,
) -> tuple[Tensor, Tensor]:
    """`sparse_flash_attention` on a cache of packed int8 rows (`pack_latents`)."""
    out: tuple[Tensor, Tensor] = _function("sparse_flash_attention_quant", ql_nope.device.type)(
        ql_nope, q_pe, kv_cache, topk_indices, query_start_loc, seq_lens, block_table, scale, round_probs
    )
    return out


@torch.library.custom_op("glm5_ascend::mla_preprocess", mutates_args=("ckv_cache", "kpe_cache"))
def _mla_preprocess_op(
    hidden_states: Tensor,
    cos: Tensor,
    sin: Tensor,
    qkv_a: list[Tensor | None],
    qkv_a_mode: str,
    q_b: list[Tensor | None],
    q_b_mode: str,
    w_uk_t: Tensor,
    q_a_gamma: Tensor,
    kv_a_gamma: Tensor,
    slot_mapping: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    out: tuple[Tensor, Tensor, Tensor] = _function("mla_preprocess", hidden_states.device.type)(
        hidden_states,
        cos,
        sin,
        _as_linear(qkv_a, qkv_a_mode),
        _as_linear(q_b, q_b_mode),
        w_uk_t,
        q_a_gamma,
        kv_a_gamma,
        slot_mapping,
        ckv_cache,
        kpe_cache,
        eps,
    )
    return out


@_mla_preprocess_op.register_fake
def _(
    hidden_states: Tensor,
    cos: Tensor,
    sin: Tensor,
    qkv_a: list[Tensor | None],
    qkv_a_mode: str,
    q_b: list[Tensor | None],
    q_b_mode: str,
    w_uk_t: Tensor,
    q_a_gamma: Tensor,
    kv_a_gamma: Tensor,
    slot_mapping: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, (heads, _, kv_lora) = hidden_states.shape[0], w_uk_t.shape
    return (
        hidden_states.new_empty((tokens, heads, kv_lora)),
        hidden_states.new_empty((tokens, heads, kpe_cache.shape[2])),
        hidden_states.new_empty((tokens, q_a_gamma.shape[0])),
    )


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
    out: tuple[Tensor, Tensor, Tensor] = _mla_preprocess_op(
        hidden_states,
        cos,
        sin,
        _as_list(qkv_a),
        qkv_a.quant_mode,
        _as_list(q_b),
        q_b.quant_mode,
        w_uk_t,
        q_a_gamma,
        kv_a_gamma,
        slot_mapping,
        ckv_cache,
        kpe_cache,
        eps,
    )
    return out


def _as_list(w: LinearWeights) -> list[Tensor | None]:
    """A torch op takes tensors, not tuples of our own: the tensors of `LinearWeights` in field order."""
    return [w.weight, w.scale, w.input_scale, w.input_offset, w.quant_bias]


def _as_linear(tensors: list[Tensor | None], mode: str) -> LinearWeights:
    weight, scale, input_scale, input_offset, quant_bias = tensors
    if weight is None:
        raise KernelInputError("a linear layer needs a weight")
    return LinearWeights(weight, mode, scale, input_scale, input_offset, quant_bias)


def int8_linear(x: Tensor, w: LinearWeights) -> Tensor:
    """x [..., K] times the quantized weight [N, K] transposed -> [..., N] in x's dtype."""
    out: Tensor = _function("int8_linear", x.device.type)(x, w)
    return out


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
    out: Tensor = _function("w4a8_moe", x.device.type)(x, topk_weights, topk_ids, w13, w13_scale, w2, w2_scale)
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
