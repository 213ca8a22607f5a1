"""Lightning Indexer by the official kernels: torch_npu's, for int8 keys vllm-ascend's."""

from __future__ import annotations

import torch

from glm5_kernels.ascend.operators import HALF, operator, paged, support, support_pages
from glm5_kernels.lightning_indexer import LightningIndexer, LightningIndexerQuant


def lightning_indexer(operands: LightningIndexer) -> torch.Tensor:
    """Run the indexer in bf16 or fp16, 128 dims, at most 64 heads, no holes in the block table."""
    q, k_cache, weights, batch, topk, pool = operands
    support(pool == 1, f"takes a key for each token, not for {pool}")
    _support(q, k_cache, topk)
    support(q.dtype in HALF and k_cache.dtype == q.dtype, f"takes bf16 or fp16, got {q.dtype} and {k_cache.dtype}")
    positions, _ = operator("npu", "npu_lightning_indexer")(
        q.contiguous(), k_cache[:, :, None], weights.to(q.dtype), sparse_count=topk, **paged(batch, "key")
    )
    return _rows(positions)


def lightning_indexer_quant(operands: LightningIndexerQuant) -> torch.Tensor:
    """Run the indexer on int8 keys; weights and scales become fp16."""
    q, k_cache, weights, q_scale, k_scale_cache, batch, topk = operands
    _support(q, k_cache, topk)
    positions = operator("_C_ascend", "npu_lightning_indexer_quant")(
        q.contiguous(), k_cache[:, :, None], weights.half(), q_scale.half(), k_scale_cache.half()[:, :, None],
        sparse_count=topk, query_quant_mode=0, key_quant_mode=0, **paged(batch, "key"),
    )  # fmt: skip
    return _rows(positions)


def _support(q: torch.Tensor, k_cache: torch.Tensor, topk: int) -> None:
    support_pages(k_cache)
    support(q.shape[2] == 128 and q.shape[1] <= 64, f"takes at most 64 heads of 128, got {list(q.shape[1:])}")
    support(topk <= 2048 or (topk <= 8192 and topk % 1024 == 0), f"selects 1-2048, 3072, ... 8192, not {topk}")


def _rows(positions: torch.Tensor) -> torch.Tensor:
    """[T, 1, topk] (one key head) as [T, topk]."""
    return positions[:, 0].int()
