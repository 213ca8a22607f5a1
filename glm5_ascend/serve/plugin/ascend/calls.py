"""Calls of vllm-ascend's DeviceOperator for sparse attention (0.23 and 0.30), converted to arguments of our ops.

Arguments are taken by name from its signatures, so their order does not matter. From 0.30 on the indexer has its own
caches.
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
_CACHE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def named(method: Callable[..., Any], arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a call by their parameter names in `method`.

    Raises:
        ConfigError: the call is on int8 caches, whose layouts our NPU kernels do not read.
    """
    call = dict(inspect.signature(method).bind(*arguments, **keywords).arguments)
    if call.get("enable_sparse_li_c8") or call["kv_cache"][0].dtype not in _CACHE_DTYPES:
        raise ConfigError("GLM5_KERNELS: int8 caches (C8) need the official kernels", "unset it, or C8 off")
    return call


def indexer_arguments(call: Mapping[str, Any]) -> tuple[Any, ...]:
    """Arguments of `lightning_indexer`."""
    keys = call["kv_cache"][call.get("indexer_k_cache_idx", 2)][:, :, 0]  # 0.23 has the caches of attention before it
    return call["q_li"], keys, call["weights"], batch(call, call["attn_metadata"].block_table), TOPK


def attention_arguments(call: Mapping[str, Any]) -> tuple[Any, ...]:
    """Arguments of `sparse_flash_attention`."""
    table = call.get("block_table")
    if table is None:
        table = call["attn_metadata"].block_table
    latents, rope = (cache[:, :, 0] for cache in call["kv_cache"][:2])
    topk_indices = call["topk_indices"].flatten(1)
    return call["ql_nope"], call["q_pe"], latents, rope, topk_indices, batch(call, table), call["sfa_impl"].scale


def batch(call: Mapping[str, Any], table: torch.Tensor) -> PagedBatch:
    """The requests of a call; vllm-ascend's cumulative query lengths have no leading 0."""
    sums = call["actual_seq_lengths_query"]
    if not isinstance(sums, torch.Tensor):
        raise ConfigError("this vllm-ascend gives lengths as a list", f"use vllm-ascend {STABLE.tested[0]}")
    return PagedBatch(torch.cat([sums.new_zeros(1), sums]), call["actual_seq_lengths_key"], table)
