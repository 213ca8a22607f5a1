"""Lightning Indexer: for each query token, the `topk` earlier positions that sparse attention will read.

    score[t, s] = sum_h weights[t, h] * relu(q[t, h, :] . k[s, :])          in fp32
    out[t, :]   = the min(topk, visible) positions s < visible(t) with the largest score, then -1

T query tokens of all requests in a row, H index heads, D index head dim.

Rules: query i of n sees positions 0 .. seq_len - n + i. Equal scores: the lowest position wins, always. A position
that is not visible, whose block is missing, or whose score is NaN, is never returned. Attention does not depend on the
order; the official operators (`ascend/`) return their own.

A key may stand for a pool of P tokens (GLM-5.3-Flash: P = 4, keys by `indexer_pool`): seq_lens still count tokens, row
i of the cache is the key of positions P * i .. P * i + P - 1, and a query that sees n positions sees the n // P pools
that are complete, chooses the topk // P best of them, and the n % P positions behind them always:

    out[t, :]   = the positions of those pools, then those of the open pool, then -1; topk + P - 1 in all

Source: arXiv 2512.02556 (DeepSeek-V3.2), `GlmMoeDsaIndexer` of transformers 5.19, `npu_lightning_indexer`
(sparse_mode 3); for int8 vllm-ascend's `npu_lightning_indexer_quant` and `attention/sfa_v1.py` (Hadamard, scales).
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

from torch import Tensor

from glm5_kernels.errors import KernelInputError
from glm5_kernels.paged_cache import PagedBatch, check_blocks, pooled


class LightningIndexer(NamedTuple):
    """The `topk` best visible positions of each query token: int32 [T, topk + pool - 1], ascending, then -1."""

    q: Annotated[Tensor, "float [T, H, D]"]  # rotated
    k_cache: Annotated[Tensor, "float [num_blocks, block_size, D]"]  # rotated, with this step's keys
    weights: Annotated[Tensor, "float [T, H]"]  # any sign; a positive constant factor changes nothing
    batch: PagedBatch
    topk: int
    pool: int = 1  # tokens of a key; divides topk

    def rules(self) -> None:
        _check(self)
        if self.pool < 1 or self.topk % self.pool:
            raise KernelInputError(f"pool is {self.pool}, must divide topk, {self.topk}")

    def check_values(self) -> None:
        check_blocks(pooled(self.batch, self.pool), *self.k_cache.shape[:2])


class LightningIndexerQuant(NamedTuple):
    """`LightningIndexer` on int8 queries and keys with their scales (LI-C8, half the bytes; see `quantize_indexer`).

    score[t, s] = k_scale[s] * sum_h weights[t, h] * relu(q_scale[t, h] * (q[t, h, :] . k[s, :]))
    """

    q: Annotated[Tensor, "int8 [T, H, D]"]
    k_cache: Annotated[Tensor, "int8 [num_blocks, block_size, D]"]
    weights: Annotated[Tensor, "float [T, H]"]
    q_scale: Annotated[Tensor, "float [T, H]"]  # positive; fp16 on an NPU
    k_scale_cache: Annotated[Tensor, "float [num_blocks, block_size]"]
    batch: PagedBatch
    topk: int

    def rules(self) -> None:
        _check(self)

    def check_values(self) -> None:
        check_blocks(self.batch, *self.k_cache.shape[:2])


def _check(operands: LightningIndexer | LightningIndexerQuant) -> None:
    if 0 in operands.q.shape[1:]:
        raise KernelInputError(f"q has shape {list(operands.q.shape)}, expected at least one head and one dim")
    if operands.topk < 1:
        raise KernelInputError(f"topk is {operands.topk}, must be at least 1")
