"""The Lightning Indexer in C++ (csrc/lightning_indexer_tasks.h)."""

from __future__ import annotations

import torch

from glm5_kernels.lightning_indexer import LightningIndexer, LightningIndexerQuant, expanded
from glm5_kernels.native.library import function
from glm5_kernels.native.rows import DTYPES, ROWS, as_int32, as_rows, rows
from glm5_kernels.paged_cache import query_layout


def lightning_indexer(operands: LightningIndexer) -> torch.Tensor:
    return expanded(operands, _select(operands, operands.weights.float(), None, operands.pool))


def lightning_indexer_quant(operands: LightningIndexerQuant) -> torch.Tensor:
    """The scales of queries are positive, so they may multiply the weights."""
    return _select(operands, operands.weights.float() * operands.q_scale.float(), operands.k_scale_cache.float())


def _select(
    operands: LightningIndexer | LightningIndexerQuant,
    weights: torch.Tensor,
    k_scale: torch.Tensor | None,
    pool: int = 1,
) -> torch.Tensor:
    q, k_cache = (as_rows(x, dtypes=tuple(DTYPES)) for x in (operands.q, operands.k_cache))
    (tokens, heads, dims), batch, topk = q.shape, operands.batch, operands.topk // pool
    visible, out = query_layout(batch, tokens)[1] // pool, torch.empty(tokens, topk, dtype=torch.int32)
    starts, block_table = batch.query_start_loc.long().contiguous(), as_int32(batch.block_table)
    weights, k_scale = weights.contiguous(), None if k_scale is None else k_scale.contiguous()
    function("lightning_indexer", 2 * ROWS + "ppppp" + "iiiiii" + "p")(
        *rows(q), *rows(k_cache), weights.data_ptr(), 0 if k_scale is None else k_scale.data_ptr(),
        starts.data_ptr(), visible.data_ptr(), block_table.data_ptr(),
        *block_table.shape, k_cache.shape[1], heads, dims, topk, out.data_ptr(),
    )  # fmt: skip
    return out
