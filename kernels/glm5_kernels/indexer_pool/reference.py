"""Plain torch version of the indexer's pools: one request at a time."""

from __future__ import annotations

import itertools

import torch

from glm5_kernels.indexer_pool import IndexerPool
from glm5_kernels.paged_cache import physical_rows, query_layout, write_rows


def indexer_pool(operands: IndexerPool) -> None:
    k, gate, ape, batch, tail_blocks, tail_cache, pool_cache = operands
    query_layout(batch, len(k))  # refuses a query_start_loc that does not fit
    pool, ring, tokens = len(ape), tail_cache.shape[2], torch.stack([k, gate])
    for b, (start, end) in enumerate(itertools.pairwise(batch.query_start_loc.tolist())):
        length, block = int(batch.seq_lens[b]), int(tail_blocks[b])
        new = min(end - start, length)  # tokens before position 0 are padding
        if new <= 0 or block < 0:
            continue
        first, tail = length - new, tail_cache[block]  # [2, ring, D]
        opened = torch.arange(first // pool * pool, first)  # positions of the open pool
        keys, gates = torch.cat([tail[:, opened % ring], tokens[:, end - new : end]], 1).float()
        whole = len(keys) // pool * pool
        share = (gates[:whole].view(-1, pool, k.shape[1]) + ape.float()).softmax(1)
        pooled = (share * keys[:whole].view(share.shape)).sum(1)
        numbers = first // pool + torch.arange(len(pooled))
        rows = physical_rows(numbers[None], batch.block_table[b : b + 1], pool_cache.shape[1])[0]
        write_rows(pool_cache, rows, pooled)
        ring_positions = torch.arange(max(first, length - ring), length)
        tail[:, ring_positions % ring] = tokens[:, end - len(ring_positions) : end]
