"""Lightning Indexer compiled: a lane for each head, so that keys are read where they lie; top-k by counting.

Memory: fp32 scores of at most `SCORES` (token, position) pairs per thread, whatever the context's length is.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
import torch

from glm5_kernels.compiled.rows import KINDS, PAIRED, RowAddress, row_address
from glm5_kernels.compiled.simd import PAIRS, WIDTH, in_steps
from glm5_kernels.compiled.threads import each
from glm5_kernels.lightning_indexer.cpu_tiles import choose
from glm5_kernels.lightning_indexer.reference import check, check_quant
from glm5_kernels.paged_cache import PagedBatch, query_layout, readable

#: 32 MiB of scores.
SCORES = 2**23
#: Query tokens of a task: they share the keys that were read.
TOKENS = 64
#: Keys of a part, where one request's keys are shared among threads.
SPAN = 4096


class IndexerCall(NamedTuple):
    """All tokens' queries and all requests' keys; T tokens, H heads, D dims (a multiple of WIDTH).

    Attributes:
        query: rows (token, head) of D elements; where their kind is PAIRED, the keys' is, too.
        dims: of query and keys, in elements of 32 bits once they are fp32 or pairs.
        weights: fp32 [T, H].
        visible: int64 [T]. block_table: int64 [B, max_blocks].
        keys: rows (block, offset) of the cache. block_size: rows of a block.
        key_scale: fp32 [num_blocks, block_size] of int8 keys, else empty.
        out: int32 [T, topk].
    """

    query: RowAddress
    dims: int
    weights: Any
    visible: Any
    block_table: Any
    keys: RowAddress
    block_size: int
    key_scale: Any
    out: Any


class Task(NamedTuple):
    """Query tokens first..last of a request.

    Attributes:
        length: positions that the last one sees. start, stop: of them, those to be scored; start a multiple of STEP.
        chooses: whether all are scored then, so that the best can be taken.
    """

    request: int
    first: int
    last: int
    length: int
    start: int
    stop: int
    chooses: bool


def lightning_indexer(
    q: torch.Tensor, k_cache: torch.Tensor, weights: torch.Tensor, batch: PagedBatch, topk: int
) -> torch.Tensor:
    """See the package docstring."""
    check(q, k_cache, weights, batch, topk)
    return _choose(q, k_cache, weights, None, batch, topk)


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
    scaled = q.float() * q_scale.float()[..., None]
    return _choose(scaled, k_cache, weights, k_scale_cache.float(), batch, topk)


def _choose(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    weights: torch.Tensor,
    k_scale: torch.Tensor | None,
    batch: PagedBatch,
    topk: int,
) -> torch.Tensor:
    num_tokens, _, dim = q.shape
    visible = readable(query_layout(batch, num_tokens)[1], batch, k_cache.shape[1])
    q, k_cache = _whole_rows(q), _whole_rows(k_cache)
    pairs = PAIRS and q.dtype == k_cache.dtype == torch.bfloat16 and not dim % (2 * WIDTH)
    out = torch.full((num_tokens, topk), -1, dtype=torch.int32)
    tasks: list[Task] = []
    seen = visible.tolist()
    for request, (start, end) in enumerate(itertools.pairwise(batch.query_start_loc.tolist())):
        length = seen[end - 1] if end > start else 0
        size = min(TOKENS, max(1, SCORES // max(length, 1)))
        if length > 0:
            for first in range(start, end, size):
                last = min(first + size, end)
                tasks.append(Task(request, first, last, seen[last - 1], 0, seen[last - 1], True))

    kind = PAIRED if pairs else None
    step = IndexerCall(
        row_address(q, kind), q.shape[2] // (2 if pairs else 1), weights.float().numpy(),
        visible.numpy(), batch.block_table.long().numpy(), row_address(k_cache, kind), k_cache.shape[1],
        (torch.empty(0, 0) if k_scale is None else k_scale).numpy(), out.numpy(),
    )  # fmt: skip
    threads = torch.get_num_threads()
    if len(tasks) < threads:
        for task in tasks:
            _choose_with_all_threads(task, step)
        return out
    size = len(tasks) if threads == 1 else max(1, len(tasks) // (4 * threads))
    parts = [tasks[number : number + size] for number in range(0, len(tasks), size)]
    each(lambda number: choose(np.array(parts[number]), step, _room(parts[number])), len(parts))
    return out


def _whole_rows(x: torch.Tensor) -> torch.Tensor:
    """x, if its rows are of a kind that can be read where they lie; else as fp32, zeros behind each row."""
    if x.dtype in KINDS and x.stride(-1) == 1 and not x.shape[-1] % WIDTH:
        return x
    return torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % WIDTH)).contiguous()


def _room(tasks: list[Task]) -> Any:
    """For the scores of one task after the other."""
    return np.empty(max((task.last - task.first) * in_steps(task.length) for task in tasks), np.float32)


def _choose_with_all_threads(task: Task, step: IndexerCall) -> None:
    """One long request: its keys in parts for all threads."""
    scores = _room([task])

    def score_part(number: int) -> None:
        part = task._replace(start=number * SPAN, stop=min((number + 1) * SPAN, task.length), chooses=False)
        choose(np.array([part]), step, scores)

    each(score_part, -(-task.length // SPAN))
    choose(np.array([task._replace(stop=0)]), step, scores)
