"""Pools of index keys in C++ (csrc/indexer_pool.h)."""

from __future__ import annotations

from glm5_kernels import indexer_pool as reference
from glm5_kernels.indexer_pool import IndexerPool
from glm5_kernels.native.library import function
from glm5_kernels.native.rows import FLOATS, LANES, ROWS, as_int32, as_rows, matrix, rows
from glm5_kernels.paged_cache import query_layout


def indexer_pool(operands: IndexerPool) -> None:
    k, gate, ape, batch, tail_blocks, tail_cache, pool_cache = operands
    plain_caches = tail_cache.stride(-1) == pool_cache.stride(-1) == 1 and pool_cache.dtype in FLOATS
    if not plain_caches or k.dtype not in FLOATS or k.shape[1] % LANES:
        return reference.indexer_pool(operands)
    k, gate, ape = as_rows(k), as_rows(gate), ape.float().contiguous()
    starts, (request, visible) = batch.query_start_loc.long().contiguous(), query_layout(batch, len(k))
    block_table, rings = as_int32(batch.block_table), as_int32(tail_blocks)
    function("indexer_pool", 2 * ROWS + "p" + 3 * ROWS + "ppppp" + "iiiiii")(
        *matrix(k), *matrix(gate), ape.data_ptr(), *rows(tail_cache[:, 0]), *rows(tail_cache[:, 1]),
        *rows(pool_cache), starts.data_ptr(), request.data_ptr(), visible.data_ptr(), block_table.data_ptr(),
        rings.data_ptr(), len(k), block_table.shape[1], pool_cache.shape[1], k.shape[1], len(ape), tail_cache.shape[2],
    )  # fmt: skip
    return None
