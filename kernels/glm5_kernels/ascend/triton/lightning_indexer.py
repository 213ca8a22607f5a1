"""Lightning Indexer by our Triton kernels (`triton_kernels`, `triton_choice`), for Triton-Ascend."""

from __future__ import annotations

import itertools

import torch

from glm5_kernels.ascend.triton.kernels.lightning_indexer import score_pages
from glm5_kernels.ascend.triton.kernels.lightning_indexer_choice import choose_positions
from glm5_kernels.ascend.triton.launch import launch, padded, support, support_power
from glm5_kernels.lightning_indexer.reference import check, check_quant
from glm5_kernels.paged_cache import PagedBatch, query_layout

#: Query rows (tokens times heads) of one matrix product. With 128 its fp32 scores and their copies overflow UB.
QUERY_ROWS = 64
#: Pages whose copies and products are under way together: a core's wait for another core stops its scalar pipe.
AT_ONCE = 2
#: Tokens whose scores are held at once, two for each vector core of a die: 96 times 64k of them are 25 MB. Where the
#: context is long, as many as have this many scores: one for each vector core at 1,048,576 positions, 201 MB.
TOKENS, SCORES = 96, 48 * 1048576
#: Scores counted at once; runs of scores and their length in the sample that shows where the level lies; tiles of a row
#: that stay in UB.
TILE, SAMPLE, HELD = 4096, (16, 128), 4
#: A count adds tile by tile in fp16, exact up to 2048, then lanes in fp32, exact beyond this many: up to 256 tiles.
LONGEST = 256 * TILE
#: Runs of positions and their length, where a row's tiles stay in UB (runs are sorted: 32 times a power of four) and
#: where not; how many positions of each are taken out together.
SHORT, LONG, SLOTS = (8, 512), (32, 128), 32
#: Vector and cube cores of a die.
PROGRAMS, CUBES = 48, 24


def lightning_indexer(
    q: torch.Tensor, k_cache: torch.Tensor, weights: torch.Tensor, batch: PagedBatch, topk: int
) -> torch.Tensor:
    """See the package docstring; heads, dims and block_size are powers of two."""
    check(q, k_cache, weights, batch, topk)
    support(q.dtype == k_cache.dtype, f"takes queries and keys of one dtype, got {q.dtype} and {k_cache.dtype}")
    return _choose(q, k_cache, weights, None, None, batch, topk)


def lightning_indexer_quant(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    weights: torch.Tensor,
    q_scale: torch.Tensor,
    k_scale_cache: torch.Tensor,
    batch: PagedBatch,
    topk: int,
) -> torch.Tensor:
    """See the package docstring."""
    check_quant(q, k_cache, q_scale, k_scale_cache)
    check(q, k_cache, weights, batch, topk)
    support(k_scale_cache.is_contiguous(), "reads contiguous key scales")
    return _choose(q, k_cache, weights, q_scale, k_scale_cache, batch, topk)


def _choose(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    weights: torch.Tensor,
    q_scale: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    batch: PagedBatch,
    topk: int,
) -> torch.Tensor:
    tokens, heads, dim = q.shape
    page = k_cache.shape[1]
    support_power("heads, index_head_dim and block_size", heads, dim, page)
    support(k_cache.stride(2) == 1, "reads keys whose elements follow each other")
    support(k_cache.shape[0] * k_cache.stride(0) < 2**31, "addresses a cache by int32, this one is larger")
    device = q.device
    _, visible = query_layout(batch, tokens)
    seen = visible.clamp(0, batch.block_table.shape[1] * page).int().to(device)
    out = torch.full((tokens, topk), -1, dtype=torch.int32, device=device)
    starts = batch.query_start_loc.tolist()
    longest = max((end - start for start, end in itertools.pairwise(starts)), default=1)
    per_group = max(1, QUERY_ROWS // heads) if longest > 1 else 1
    pages = -(-int(visible.max()) // page) if tokens else 0
    support(pages * page <= LONGEST, f"counts up to {LONGEST:,} positions of a request, got {pages * page:,}")
    width = padded(max(pages, 1) * page, TILE)
    held = width <= HELD * TILE
    rows, columns = SHORT if held else LONG
    groups = _groups(starts, per_group, min(TOKENS, SCORES // width))
    q, weights, blocks = q.contiguous(), weights.contiguous(), batch.block_table.int().contiguous()
    # bf16 weights and scales are widened inside; what no int8 kernel reads is any tensor of the right device.
    q_scale = weights if q_scale is None else q_scale.contiguous()
    k_scale = weights if k_scale is None else k_scale
    for part in groups:
        lo, hi = part[0][0], part[-1][0] + part[-1][1]
        scores = torch.full((hi - lo, width), float("nan"), device=device)
        runs = torch.empty(hi - lo, width, dtype=torch.int32, device=device)
        numbers = torch.empty(hi - lo, width // columns, dtype=torch.int32, device=device)
        table = torch.tensor([(start - lo, count, owner) for start, count, owner in part], dtype=torch.int32)
        each = max(1, -(-pages * len(part) // CUBES))
        launch(
            score_pages, (len(part), -(-pages // each)),
            q[lo:hi], k_cache, weights[lo:hi], q_scale[lo:hi], k_scale, blocks, table.to(device),
            seen[lo:hi], scores, k_cache.stride(0), k_cache.stride(1), blocks.shape[1], scores.stride(0), each,
            H=heads, D=dim, BT=per_group, PAGE=page, INT8=q.dtype == torch.int8, AT_ONCE=AT_ONCE,
        )  # fmt: skip
        # Parts of a row, in whole tiles, so that all vector cores have one.
        tiles = width // TILE
        step = -(-tiles // max(1, PROGRAMS // (hi - lo))) * TILE
        launch(
            choose_positions, (hi - lo, -(-width // step)),
            scores, seen[lo:hi], runs, numbers, *[out[lo:hi]] * 4,
            scores.stride(0), numbers.stride(0), out.stride(0), topk, step,
            TILE=TILE, SAMPLE_ROWS=SAMPLE[0], SAMPLE_COLUMNS=SAMPLE[1], HELD=int(held),
            ROWS=rows, COLUMNS=columns, SLOTS=SLOTS,
        )  # fmt: skip
    return out


def _groups(starts: list[int], per_group: int, most: int) -> list[list[tuple[int, int, int]]]:
    """(first token, count, request) of tokens in a row of one request, in lists of about `most` tokens."""
    groups = [
        (first, min(per_group, end - first), request)
        for request, (start, end) in enumerate(itertools.pairwise(starts))
        for first in range(start, end, per_group)
    ]
    parts: list[list[tuple[int, int, int]]] = []
    for group in groups:
        if not parts or group[0] + group[1] - parts[-1][0][0] > most:
            parts.append([])
        parts[-1].append(group)
    return parts
