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

from typing import Annotated, NamedTuple

from torch import Tensor

from glm5_kernels.contract import WRITTEN, largest, require_same_dtype, require_shape
from glm5_kernels.errors import KernelInputError
from glm5_kernels.paged_cache import PagedBatch, check_blocks, pooled


class IndexerPool(NamedTuple):
    """Writes this step's tokens into the rings, and the pools that they complete into pool_cache; returns nothing."""

    k: Annotated[Tensor, "float [T, D]"]  # after k_norm
    gate: Annotated[Tensor, "float [T, D]"]  # the input times index_kpool_compress_gate; of k's dtype, as tail_cache
    ape: Annotated[Tensor, "float [P, D]"]  # index_kpool_compress_ape
    batch: PagedBatch
    tail_blocks: Annotated[Tensor, "int [B]"]  # the ring of each request; negative = padding, nothing is written
    tail_cache: Annotated[Tensor, "float [rings, 2, ring, D]", WRITTEN]
    pool_cache: Annotated[Tensor, "float [num_blocks, block_size, D]", WRITTEN]

    def rules(self) -> None:
        require_same_dtype("gate", self.gate, "k", self.k)
        require_same_dtype("tail_cache", self.tail_cache, "k", self.k)
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
