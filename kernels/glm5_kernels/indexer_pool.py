"""Indexer pool: the keys of an indexer whose keys are pools of P tokens, for `lightning_indexer` with `pool` = P.

Tokens P * i .. P * i + P - 1 of a request are its pool i. Its key, per channel:

    share = softmax over the pool's tokens of (gate + ape)        fp32
    key   = sum over the pool's tokens of share * k               fp32, rounded to pool_cache's dtype

T query tokens, D index_head_dim, P index_kpool. Positions are those of `PagedBatch`, whose seq_lens count tokens, and
whose block_table is that of pool_cache: pool i of request b is row i % block_size of block
block_table[b, i // block_size].

A pool is written in the step of its last token. Until then its tokens are kept in the request's ring,
tail_cache[tail_blocks[b]]: the token of position p is row p % ring, k in half 0 and the gate in half 1. So every cut of
a prompt gives the same pools, bit by bit. A step that begins at an earlier position than the last one ended, because
drafts were rejected, writes tokens and pools again; for this the ring has at least P + drafts rows.

Source: transformers 5.19 `modeling_glm5_next.py`; vLLM 0.32 `models/glm5next/common/attention.py` (the ring).
"""

from __future__ import annotations

import itertools
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from glm5_kernels.contract import WRITTEN, largest, require_shape
from glm5_kernels.errors import KernelInputError
from glm5_kernels.paged_cache import PagedBatch, check_blocks, physical_rows, pooled, query_layout, write_rows


class IndexerPool(NamedTuple):
    """Writes this step's tokens into the rings, and the pools that they complete into pool_cache; returns nothing."""

    k: Annotated[Tensor, "float [T, D]"]  # after k_norm
    gate: Annotated[Tensor, "k [T, D]"]  # the input times index_kpool_compress_gate
    ape: Annotated[Tensor, "float [P, D]"]  # index_kpool_compress_ape
    batch: PagedBatch
    tail_blocks: Annotated[Tensor, "int [B]"]  # the ring of each request; negative = padding, nothing is written
    tail_cache: Annotated[Tensor, "k [rings, 2, ring, D]", WRITTEN]
    pool_cache: Annotated[Tensor, "float [num_blocks, block_size, D]", WRITTEN]

    def rules(self) -> None:
        require_shape("tail_blocks", self.tail_blocks, tuple(self.batch.seq_lens.shape))
        if not 1 <= len(self.ape) <= self.tail_cache.shape[2]:
            rows = self.tail_cache.shape[2]
            raise KernelInputError(f"tail_cache keeps {rows} tokens of a request, pools have {len(self.ape)}")

    def check_values(self) -> None:
        check_blocks(pooled(self.batch, len(self.ape)), *self.pool_cache.shape[:2])
        if largest(self.tail_blocks) >= len(self.tail_cache):
            raise KernelInputError(
                f"tail_blocks names ring {largest(self.tail_blocks)}, tail_cache has {len(self.tail_cache)}"
            )


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
