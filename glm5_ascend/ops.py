"""The one door to the fused operators: typed Python functions, and the same ops registered with torch.

Everything outside `glm5_kernels` calls the functions of this module; nothing else imports `glm5_kernels` (but
tests/ops). The three attention ops are also `torch.ops.glm5_ascend.<name>`, so that profilers, dispatch modes and
compiled graphs see each as one op. Maths, shapes and errors stand in the op's package, e.g.
`glm5_kernels.lightning_indexer`.
"""

from __future__ import annotations

import torch

from glm5_kernels.errors import KernelInputError
from glm5_kernels.int8 import NO_QUANT, PER_TENSOR, PER_TOKEN, LinearWeights
from glm5_kernels.int8_linear.reference import int8_linear
from glm5_kernels.lightning_indexer import reference as _lightning_indexer
from glm5_kernels.mla_preprocess import reference as _mla_preprocess
from glm5_kernels.paged import write_rows
from glm5_kernels.sparse_flash_attention import reference as _sparse_flash_attention
from glm5_kernels.w4a8_moe.reference import w4a8_moe

__all__ = [
    "NO_QUANT",
    "PER_TENSOR",
    "PER_TOKEN",
    "KernelInputError",
    "LinearWeights",
    "int8_linear",
    "lightning_indexer",
    "mla_preprocess",
    "sparse_flash_attention",
    "w4a8_moe",
    "write_rows",
]

Tensor = torch.Tensor


@torch.library.custom_op("glm5_ascend::lightning_indexer", mutates_args=(), device_types="cpu")
def _lightning_indexer_op(
    q: Tensor,
    k_cache: Tensor,
    weights: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    topk: int,
) -> Tensor:
    return _lightning_indexer.lightning_indexer(q, k_cache, weights, query_start_loc, seq_lens, block_table, topk)


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


@torch.library.custom_op("glm5_ascend::sparse_flash_attention", mutates_args=(), device_types="cpu")
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
    return _sparse_flash_attention.sparse_flash_attention(
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


@torch.library.custom_op("glm5_ascend::mla_preprocess", mutates_args=("ckv_cache", "kpe_cache"), device_types="cpu")
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
    return _mla_preprocess.mla_preprocess(
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
