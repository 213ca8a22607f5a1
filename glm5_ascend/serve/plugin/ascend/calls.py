"""Calls of vllm-ascend's DeviceOperator for sparse attention (0.23 and 0.30), converted to arguments of our ops.

Arguments are taken by name from its signatures, so their order does not matter. From 0.30 on the indexer has its own
caches, and its call no longer names the layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from glm5_ascend.engine_lines import STABLE
from glm5_ascend.errors import ConfigError
from glm5_kernels.ops import PagedBatch

INDEXER, ATTENTION = "indexer_select_post_process", "execute_sparse_flash_attention_process"
#: The constant sparse_count in vllm-ascend's calls.
TOPK = 2048


def named(method: Callable[..., Any], arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a call by their parameter names in `method`."""
    return dict(inspect.signature(method).bind(*arguments, **keywords).arguments)


def layer_of(method: Callable[..., Any], arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> str:
    """Name of the calling layer; for an indexer of 0.30, which does not know it, the address of its cache."""
    names = inspect.signature(method).parameters
    if "sfa_impl" in names:
        implementation = keywords.get("sfa_impl", arguments[0] if arguments else None)
        return str(getattr(implementation, "layer_name", "?"))
    caches = keywords["kv_cache"] if "kv_cache" in keywords else arguments[list(names).index("kv_cache")]
    return f"indexer with its cache at {caches[0].data_ptr():#x}"


def has_int8_cache(call: Mapping[str, Any]) -> bool:
    """True for a call on int8 caches, whose layouts our NPU kernels do not read."""
    caches = call["kv_cache"]
    return bool(call.get("enable_sparse_li_c8")) or caches[0].dtype not in (
        torch.bfloat16,
        torch.float16,
        torch.float32,
    )


def indexer_arguments(call: Mapping[str, Any]) -> tuple[Any, ...]:
    """Arguments of `lightning_indexer`."""
    return (
        call["q_li"],
        call["kv_cache"][indexer_cache_index(call)][:, :, 0],
        call["weights"],
        batch(call, call["attn_metadata"].block_table),
        TOPK,
    )


def quantized_indexer_arguments(call: Mapping[str, Any]) -> tuple[Any, ...]:
    """Arguments of `lightning_indexer_quant`."""
    first = indexer_cache_index(call)
    keys, scales = call["kv_cache"][first][:, :, 0], call["kv_cache"][first + 1]
    shape = tuple(call["q_li_shape_ori"])
    return (
        call["q_li"].view(shape),
        keys,
        call["weights"],
        call["q_li_scale"].view(shape[:-1]),
        scales.reshape(scales.shape[:2]),
        batch(call, call["attn_metadata"].block_table),
        TOPK,
    )


def indexer_cache_index(call: Mapping[str, Any]) -> int:
    """Index of the indexer's keys among the caches; their scales come next. Packed latents contain the rotated keys."""
    if "indexer_k_cache_idx" in call:  # 0.30
        return int(call["indexer_k_cache_idx"])
    return 1 if getattr(call["sfa_impl"], "enable_sparse_sfa_c8", False) else 2


def attention_arguments(call: Mapping[str, Any]) -> tuple[Any, ...]:
    """Arguments of `sparse_flash_attention`, or of `sparse_flash_attention_quant` for packed int8 latents."""
    table = call.get("block_table")
    if table is None:
        table = call["attn_metadata"].block_table
    caches = [cache[:, :, 0] for cache in call["kv_cache"][: 1 if packed_latents(call) else 2]]
    topk_indices = call["topk_indices"].flatten(1)
    return (call["ql_nope"], call["q_pe"], *caches, topk_indices, batch(call, table), call["sfa_impl"].scale)


def packed_latents(call: Mapping[str, Any]) -> bool:
    return bool(call["kv_cache"][0].dtype == torch.int8)


def batch(call: Mapping[str, Any], table: torch.Tensor) -> PagedBatch:
    """The requests of a call; vllm-ascend's cumulative query lengths have no leading 0."""
    sums = call["actual_seq_lengths_query"]
    if not isinstance(sums, torch.Tensor):
        raise ConfigError("this vllm-ascend gives lengths as a list", f"use vllm-ascend {STABLE.tested[0]}")
    return PagedBatch(torch.cat([sums.new_zeros(1), sums]), call["actual_seq_lengths_key"], table)
