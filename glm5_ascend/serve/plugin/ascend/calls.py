"""The two calls of vllm-ascend 0.23.0's DeviceOperator that matter to sparse attention, in our ops' terms.

Arguments are taken by name from its signatures, so another release's order does not matter; a missing name is told.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from glm5_ascend.errors import ConfigError

INDEXER, ATTENTION = "indexer_select_post_process", "execute_sparse_flash_attention_process"
#: sparse_count is written into vllm-ascend's calls.
TOPK = 2048


def named(method: Callable[..., Any], arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a call by their names in `method`."""
    return dict(inspect.signature(method).bind(*arguments, **keywords).arguments)


def layer_of(call: Mapping[str, Any]) -> str:
    return str(getattr(call["sfa_impl"], "layer_name", "?"))


def quantized(call: Mapping[str, Any]) -> bool:
    """Whether a call works on int8 caches, whose layouts we do not take over."""
    caches = call["kv_cache"]
    return bool(call.get("enable_sparse_li_c8")) or caches[0].dtype not in (
        torch.bfloat16,
        torch.float16,
        torch.float32,
    )


def indexer_arguments(call: Mapping[str, Any]) -> tuple[Any, ...]:
    """Of `lightning_indexer`."""
    return (
        call["q_li"],
        call["kv_cache"][2][:, :, 0],
        call["weights"],
        *batch(call, call["attn_metadata"].block_table),
        TOPK,
    )


def attention_arguments(call: Mapping[str, Any]) -> tuple[Any, ...]:
    """Of `sparse_flash_attention`."""
    table = call.get("block_table")
    if table is None:
        table = call["attn_metadata"].block_table
    latent, rope = call["kv_cache"][0][:, :, 0], call["kv_cache"][1][:, :, 0]
    chosen = call["topk_indices"].flatten(1)
    return (call["ql_nope"], call["q_pe"], latent, rope, chosen, *batch(call, table), call["sfa_impl"].scale)


def batch(call: Mapping[str, Any], table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """query_start_loc, seq_lens, block_table; vllm-ascend's sums of query lengths lack the leading 0."""
    sums = call["actual_seq_lengths_query"]
    if not isinstance(sums, torch.Tensor):
        raise ConfigError("this vllm-ascend gives lengths as a list", "use vllm-ascend 0.23.0")
    return torch.cat([sums.new_zeros(1), sums]), call["actual_seq_lengths_key"], table
