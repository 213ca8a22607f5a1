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

import itertools
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from glm5_kernels.errors import KernelInputError
from glm5_kernels.hadamard import hadamard_matrix
from glm5_kernels.paged_cache import PagedBatch, cache_rows, check_blocks, physical_rows, pooled, query_layout, readable


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


#: fp32 elements of one block's [rows, H, S] score tensor; 2**24 is 64 MiB.
BLOCK_ELEMENTS = 2**24


def lightning_indexer(operands: LightningIndexer) -> torch.Tensor:
    return expanded(operands, _select(operands, operands.q, None, operands.pool))


def lightning_indexer_quant(operands: LightningIndexerQuant) -> torch.Tensor:
    scaled = operands.q.float() * operands.q_scale.float()[..., None]
    return _select(operands, scaled, operands.k_scale_cache[..., None])


def quantize_indexer(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate and quantize x [..., D] to int8 [..., D] and fp16 scales [...], for `lightning_indexer_quant`.

    The rotation is by the Hadamard matrix of size D, so that no dimension stands out; the scale is max|x| / 127 per
    vector. A rotation of q and k alike changes no dot product.

    Raises:
        KernelInputError: there is no Hadamard matrix of size D.
    """
    size = x.shape[-1]
    y = x.float() @ (hadamard_matrix(size) * size**-0.5).to(x.device)
    scale = (y.abs().amax(-1, keepdim=True).clamp_min(1e-6) / 127).to(torch.float16)
    return torch.round(y / scale.float()).clamp_(-127, 127).to(torch.int8), scale[..., 0]


def _select(
    operands: LightningIndexer | LightningIndexerQuant, q: torch.Tensor, k_scale: torch.Tensor | None, pool: int = 1
) -> torch.Tensor:
    k_cache, weights, batch, topk = operands.k_cache, operands.weights, operands.batch, operands.topk // pool
    num_tokens, heads, _ = q.shape
    visible = readable(query_layout(batch, num_tokens)[1] // pool, batch, k_cache.shape[1])
    out = torch.full((num_tokens, topk), -1, dtype=torch.int32)
    starts = batch.query_start_loc.tolist()
    for b, (start, end) in enumerate(itertools.pairwise(starts)):
        length = int(visible[end - 1]) if end > start else 0
        if length <= 0:
            continue
        rows = physical_rows(torch.arange(length)[None], batch.block_table[b : b + 1], k_cache.shape[1])[0]  # [S]
        keys = cache_rows(k_cache, rows.clamp_min(0)).float()  # [S, D]
        factor = torch.ones(1) if k_scale is None else cache_rows(k_scale, rows.clamp_min(0)).float()[:, 0]  # [S]
        step = max(1, BLOCK_ELEMENTS // (heads * length))
        for lo in range(start, end, step):
            hi = min(lo + step, end)
            seen = (torch.arange(length) < visible[lo:hi, None]) & (rows >= 0)  # [t, S]
            dots = (q[lo:hi].float().flatten(0, 1) @ keys.T).relu_().view(hi - lo, heads, -1)  # [t, H, S]
            scores = torch.bmm(weights[lo:hi].float()[:, None, :], dots)[:, 0] * factor  # [t, S]
            out[lo:hi] = best_positions(scores, seen, topk)
    return out


def expanded(operands: LightningIndexer, pools: torch.Tensor) -> torch.Tensor:
    """int32 [T, topk + pool - 1]: the positions of the chosen pools [T, topk / pool], and of the open pool."""
    pool = operands.pool
    if pool == 1:
        return pools
    visible = query_layout(operands.batch, len(pools))[1].clamp_min(0)[:, None]
    offsets = torch.arange(pool, dtype=torch.int32)
    positions = torch.full((len(pools), operands.topk + pool - 1), -1, dtype=torch.int32)
    pools_of_token = positions[:, : operands.topk].unflatten(1, (-1, pool))
    torch.add((pools * pool)[..., None], offsets, out=pools_of_token).clamp_min_(-1)  # pool -1: all below 0
    opened = visible // pool * pool + offsets[:-1]
    open_pool = (pools >= 0).sum(1, keepdim=True) * pool + offsets[:-1]
    return positions.scatter_(1, open_pool, torch.where(opened < visible, opened, -1).int())


def best_positions(scores: torch.Tensor, seen: torch.Tensor, topk: int) -> torch.Tensor:
    """The topk seen columns of each row with the largest scores, in ascending order, then -1.

    Among equal scores the lowest columns are selected; NaN never is.
    """
    seen = seen & ~scores.isnan()
    scores = scores.masked_fill(~seen, float("-inf"))
    # stable: equal scores keep their order, so the lowest column comes first
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    hidden_last = torch.sort((~seen).gather(1, order).to(torch.int8), dim=-1, stable=True).indices  # after -inf
    order = order.gather(1, hidden_last)[:, :topk]
    unused = scores.shape[1]  # sorts after every column
    order = order.masked_fill(~seen.gather(1, order), unused).sort(dim=-1).values
    order = order.masked_fill(order == unused, -1)
    return torch.nn.functional.pad(order, (0, topk - order.shape[1]), value=-1).to(torch.int32)
