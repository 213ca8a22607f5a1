"""Lightning Indexer for Triton-Ascend: scores by our Triton kernel, the selection by torch's stable sort."""

from __future__ import annotations

import itertools

import torch

from glm5_kernels.ascend.triton.kernels.lightning_indexer import score_pages
from glm5_kernels.ascend.triton.launch import launch, support, support_power
from glm5_kernels.lightning_indexer import LightningIndexer, LightningIndexerQuant, best_positions
from glm5_kernels.paged_cache import query_layout

#: Query rows (tokens times heads) of one matrix product. With 128 its fp32 scores and their copies overflow UB.
QUERY_ROWS = 64
#: Pages whose copies and products are in flight together: a core's wait for another core stops its scalar pipe.
PAGES_IN_FLIGHT = 2
#: Scores in memory at a time: 64 MB, twice that for the int64 order of the sort.
SCORES = 2**24
#: Cube cores of a die.
CUBES = 24


def lightning_indexer(operands: LightningIndexer) -> torch.Tensor:
    """Run the indexer; heads, dims and block_size are powers of two."""
    q, k_cache = operands.q, operands.k_cache
    support(operands.pool == 1, f"takes a key for each token, not for {operands.pool}")
    support(q.dtype == k_cache.dtype, f"takes queries and keys of one dtype, got {q.dtype} and {k_cache.dtype}")
    return _select(operands, operands.weights, operands.weights)


def lightning_indexer_quant(operands: LightningIndexerQuant) -> torch.Tensor:
    """Run the indexer on int8 queries and keys."""
    support(operands.k_scale_cache.is_contiguous(), "reads contiguous key scales")
    return _select(operands, operands.q_scale.contiguous(), operands.k_scale_cache)


def _select(
    operands: LightningIndexer | LightningIndexerQuant, q_scale: torch.Tensor, k_scale: torch.Tensor
) -> torch.Tensor:
    """Only the int8 kernel reads the scales: others get any tensors. It widens bf16 weights and scales."""
    q, k_cache, weights, batch, topk = *operands[:3], operands.batch, operands.topk
    tokens, heads, dim = q.shape
    page = k_cache.shape[1]
    support_power("heads, index_head_dim and block_size", heads, dim, page)
    support(k_cache.stride(2) == 1, "reads keys whose elements follow each other")
    support(k_cache.shape[0] * k_cache.stride(0) < 2**31, "addresses a cache by int32, this one is larger")
    device = q.device
    _, visible = query_layout(batch, tokens)
    visible = visible.clamp(0, batch.block_table.shape[1] * page).int().to(device)
    out = torch.full((tokens, topk), -1, dtype=torch.int32, device=device)
    starts = batch.query_start_loc.tolist()
    longest = max((end - start for start, end in itertools.pairwise(starts)), default=1)
    group_size = max(1, QUERY_ROWS // heads) if longest > 1 else 1
    pages = -(-int(visible.max()) // page) if tokens else 0
    width = max(pages, 1) * page
    q, weights, blocks = q.contiguous(), weights.contiguous(), batch.block_table.int().contiguous()
    positions = torch.arange(width, device=device)
    for groups in _batches(starts, group_size, SCORES // width):
        lo, hi = groups[0][0], groups[-1][0] + groups[-1][1]
        scores = torch.full((hi - lo, width), float("nan"), device=device)
        table = torch.tensor([(start - lo, count, request) for start, count, request in groups], dtype=torch.int32)
        pages_per_program = max(1, -(-pages * len(groups) // CUBES))
        launch(
            score_pages, (len(groups), -(-pages // pages_per_program)),
            q[lo:hi], k_cache, weights[lo:hi], q_scale[lo:hi], k_scale, blocks, table.to(device),
            visible[lo:hi], scores, k_cache.stride(0), k_cache.stride(1), blocks.shape[1], width, pages_per_program,
            H=heads, D=dim, BT=group_size, PAGE=page, INT8=q.dtype == torch.int8, PAGES_IN_FLIGHT=PAGES_IN_FLIGHT,
        )  # fmt: skip
        out[lo:hi] = best_positions(scores, positions < visible[lo:hi, None], topk)
    return out


def _batches(starts: list[int], group_size: int, most_tokens: int) -> list[list[tuple[int, int, int]]]:
    """Lists of about `most_tokens` tokens, each of groups (first token, count, request) of one request's tokens."""
    batches: list[list[tuple[int, int, int]]] = []
    for request, (start, end) in enumerate(itertools.pairwise(starts)):
        for first in range(start, end, group_size):
            count = min(group_size, end - first)
            if not batches or first + count - batches[-1][0][0] > most_tokens:
                batches.append([])
            batches[-1].append((first, count, request))
    return batches
