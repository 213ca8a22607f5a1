"""Lightning Indexer compiled: one lane per head, so that keys are read in place; top-k bit by bit.

Memory: fp32 scores of at most `SCORES` (token, position) pairs per thread, for any context length.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
import torch

from glm5_kernels.compiled import amx
from glm5_kernels.compiled.amx import AMX
from glm5_kernels.compiled.lightning_indexer_amx import new_amx_workspace, select_by_amx
from glm5_kernels.compiled.lightning_indexer_tiles import Task, new_workspace, select
from glm5_kernels.compiled.recording import repeated
from glm5_kernels.compiled.rows import KINDS, PAIRED, RowAddress, row_address
from glm5_kernels.compiled.simd import PAIRS, WIDTH, in_steps
from glm5_kernels.compiled.threads import count, run_tasks
from glm5_kernels.lightning_indexer import LightningIndexer, LightningIndexerQuant
from glm5_kernels.paged_cache import query_layout, readable

#: 32 MiB of scores.
SCORES = 2**23
#: Query tokens of a task: they share the keys that were read.
TOKENS = 64
#: Keys of a part, where one request's keys are shared among threads.
KEYS_PER_PART = 4096


class IndexerArrays(NamedTuple):
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


_TASK = np.dtype([(name, np.int64) for name in Task._fields])


@repeated
def lightning_indexer(operands: LightningIndexer) -> torch.Tensor:
    return _select(operands, operands.q, operands.weights, torch.empty(0, 0))


@repeated
def lightning_indexer_quant(operands: LightningIndexerQuant) -> torch.Tensor:
    q, k_cache, weights, q_scale, k_scale_cache, *_ = operands
    if _fits_amx(q.shape[1], q.shape[2], k_cache.shape[1]) and _as_rows(k_cache) is k_cache:  # int8 is exact as bf16
        q, weights = q.bfloat16(), weights.float() * q_scale.float()
    else:
        q = q.float() * q_scale.float()[..., None]
    return _select(operands, q, weights, k_scale_cache.float())


def _select(
    operands: LightningIndexer | LightningIndexerQuant, q: torch.Tensor, weights: torch.Tensor, k_scale: torch.Tensor
) -> torch.Tensor:
    k_cache, batch, topk = operands.k_cache, operands.batch, operands.topk
    visible = readable(query_layout(batch, len(q))[1], batch, k_cache.shape[1])
    out = torch.full((len(q), topk), -1, dtype=torch.int32)
    q, k_cache, dim = _as_rows(q), _as_rows(k_cache), -(-q.shape[2] // WIDTH) * WIDTH
    pairs = PAIRS and q.dtype == k_cache.dtype == torch.bfloat16 and not dim % (2 * WIDTH)
    pairs |= q.dtype == torch.bfloat16 and k_cache.dtype == torch.int8  # only for AMX
    arrays = IndexerArrays(
        query=row_address(q, PAIRED if pairs else None),
        dims=dim // (2 if pairs else 1),
        weights=weights.float().numpy(),
        visible=visible.numpy(),
        block_table=batch.block_table.long().numpy(),
        keys=row_address(k_cache, PAIRED if pairs and k_cache.dtype == torch.bfloat16 else None),
        block_size=k_cache.shape[1],
        key_scale=k_scale.numpy(),
        out=out.numpy(),
    )
    _run(_tasks(batch.query_start_loc.tolist(), visible.tolist()), arrays)
    return out


def _tasks(starts: list[int], visible: list[int]) -> list[Task]:
    tasks: list[Task] = []
    for request, (start, end) in enumerate(itertools.pairwise(starts)):
        length = visible[end - 1] if end > start else 0
        if length > 0:
            size = min(TOKENS, max(1, SCORES // length))
            for first in range(start, end, size):
                last = min(first + size, end)
                tasks.append(Task(request, first, last, visible[last - 1], 0, visible[last - 1], True))
    return tasks


def _run(tasks: list[Task], operands: IndexerArrays) -> None:
    threads = count()
    if len(tasks) < threads:
        for task in tasks:
            _run_with_all_threads(task, operands)
        return
    size = len(tasks) if threads == 1 else max(1, len(tasks) // (4 * threads))
    parts = [tasks[number : number + size] for number in range(0, len(tasks), size)]
    run_tasks(lambda number: _run_tasks(parts[number], operands, _scores(parts[number])), len(parts))


def _run_with_all_threads(task: Task, operands: IndexerArrays) -> None:
    """Score the keys of one request in parts for all threads, then select."""
    scores = _scores([task])

    def score_part(number: int) -> None:
        start, stop = number * KEYS_PER_PART, min((number + 1) * KEYS_PER_PART, task.length)
        _run_tasks([task._replace(start=start, stop=stop, selects=False)], operands, scores)

    run_tasks(score_part, -(-task.length // KEYS_PER_PART))
    _run_tasks([task._replace(stop=0)], operands, scores)


def _run_tasks(tasks: list[Task], operands: IndexerArrays, scores: Any) -> None:
    heads, tokens = operands.weights.shape[1], max(task.last - task.first for task in tasks)
    rows = np.array(tasks, _TASK)
    if operands.query.kind == PAIRED and _fits_amx(heads, 2 * operands.dims, operands.block_size):
        select_by_amx(rows, operands, new_amx_workspace(scores, tokens, heads, operands.dims))
    else:
        select(rows, operands, new_workspace(scores, tokens, heads, operands.dims))


def _scores(tasks: list[Task]) -> Any:
    """Memory for the scores of the largest task."""
    return np.empty(max((task.last - task.first) * in_steps(task.length) for task in tasks), np.float32)


def _fits_amx(heads: int, dims: int, block_size: int) -> bool:
    return AMX and amx.fits(dims) and not heads % amx.TILE and not block_size % amx.TILE


def _as_rows(x: torch.Tensor) -> torch.Tensor:
    """x if compiled code can read its rows in place, else an fp32 copy with rows padded by zeros."""
    if x.dtype in KINDS and x.stride(-1) == 1 and not x.shape[-1] % WIDTH:
        return x
    return torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % WIDTH)).contiguous()
