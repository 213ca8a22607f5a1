"""`SparseMLA` bound to its operands: the same ops in the same order, for a few tokens (`binding`)."""

from __future__ import annotations

from typing import Any

import torch

from glm5_ascend.serve.plugin.binding import Calls, NotBoundError, StepInputs, room
from glm5_ascend.serve.plugin.linear import linear_weights, packed_product


def bind_attention(calls: Calls, layer: Any, hidden: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
    """Add attention and its output projection of hidden [T, hidden_size]; where its result will be.

    Raises:
        NotBoundError: the caches are int8, or an op has reasons of its own.
    """
    if layer.is_packed:
        raise NotBoundError
    tokens, attention, places = len(hidden), layer.mla_attn, room()
    ckv, kpe = attention.kv_cache.split([layer.kv_lora_rank, layer.qk_rope_head_dim], dim=-1)
    ql_nope, q_pe, q_c = calls.bind(
        "mla_preprocess",
        hidden,
        *inputs.angles(layer.rotary_emb.cos_sin_cache),
        linear_weights(layer.fused_qkv_a_proj),
        linear_weights(layer.q_b_proj),
        attention.W_UK_T.data,
        layer.q_a_layernorm.weight.data,
        layer.kv_a_layernorm.weight.data,
        inputs.tables.slots,
        ckv,
        kpe,
        layer.q_a_layernorm.variance_epsilon,
        places,
        (packed_product(layer.fused_qkv_a_proj), packed_product(layer.q_b_proj)),
    )
    chosen = layer.topk_indices_buffer[:tokens]
    if layer.indexer is not None and not layer.skip_topk:
        _bind_indexer(calls, layer, hidden, q_c, chosen, inputs)
    operands = ql_nope, q_pe, ckv, kpe, chosen, inputs.tables, attention.scale
    latent, _ = calls.bind("sparse_flash_attention", *operands, places)
    (values,) = calls.bind("v_up_proj", latent, attention.W_UV.data, places)
    return calls.linear("attention", layer.o_proj, values)


def _bind_indexer(
    calls: Calls, layer: Any, hidden: torch.Tensor, q_c: torch.Tensor, chosen: torch.Tensor, inputs: StepInputs
) -> None:
    """`indexer.choose_positions`, to `chosen`."""
    indexer, rotary_emb, places = layer.indexer, layer.indexer_rope_emb, room()
    dim, heads, cache, norm = indexer.head_dim, indexer.n_head, indexer.k_cache.kv_cache, indexer.k_norm
    q = calls.linear("index queries", indexer.wq_b, q_c).view(-1, heads, dim)  # [T, H, D]
    k, weights = calls.linear("index keys", indexer.wk_weights_proj, hidden).split([dim, heads], dim=-1)
    scaled, factor = places.tensor("index weights", (len(hidden), heads), torch.float32), dim**-0.5 * heads**-0.5
    calls.add(scaled.copy_, weights)
    calls.add(scaled.mul_, factor)
    inputs.tables.require(cache)
    (turned,) = calls.bind(
        "indexer_preprocess",
        q,
        k,
        norm.weight.data,
        norm.bias.data,
        norm.eps,
        *inputs.angles(rotary_emb.cos_sin_cache),
        not rotary_emb.is_neox_style,
        inputs.tables.slots,
        cache,
        places,
    )
    calls.bind("lightning_indexer", turned, cache, scaled, inputs.tables, chosen)
