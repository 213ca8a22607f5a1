"""Lightning Indexer compiled: a lane for each head, so that keys are read where they lie; top-k bit by bit.

Memory: fp32 scores of at most `SCORES` (token, position) pairs per thread, whatever the context's length is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from glm5_kernels.compiled import amx
from glm5_kernels.compiled.amx import AMX
from glm5_kernels.compiled.lightning_indexer_amx import choose_by_amx
from glm5_kernels.compiled.lightning_indexer_call import IndexerCall, Task
from glm5_kernels.compiled.lightning_indexer_tiles import choose
from glm5_kernels.compiled.rows import KINDS, PAIRED, row_address
from glm5_kernels.compiled.simd import PAIRS, WIDTH, in_steps
from glm5_kernels.compiled.threads import each
from glm5_kernels.errors import require_shape
from glm5_kernels.lightning_indexer.reference import check, check_quant
from glm5_kernels.paged_cache import PagedBatch, StepTables, query_layout, readable
from glm5_kernels.workspace import Bound

#: 32 MiB of scores.
SCORES = 2**23
#: Query tokens of a task: they share the keys that were read.
TOKENS = 64
#: Keys of a part, where one request's keys are shared among threads.
SPAN = 4096


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
    if _fits_amx(q.shape[1], q.shape[2], k_cache.shape[1]) and _whole_rows(k_cache) is k_cache:  # int8 is exact as bf16
        return _choose(q.bfloat16(), k_cache, weights.float() * q_scale.float(), k_scale_cache.float(), batch, topk)
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
    num_tokens = len(q)
    visible = readable(query_layout(batch, num_tokens)[1], batch, k_cache.shape[1])
    q, k_cache = _whole_rows(q), _whole_rows(k_cache)
    out = torch.full((num_tokens, topk), -1, dtype=torch.int32)
    scales = (torch.empty(0, 0) if k_scale is None else k_scale).numpy()
    table = batch.block_table.long().numpy()
    call = _call(q, k_cache, weights.float().numpy(), scales, visible.numpy(), table, out.numpy())
    _run(_tasks(batch.query_start_loc.tolist(), visible.tolist()), call)
    return out


def bind(
    q: torch.Tensor, k_cache: torch.Tensor, weights: torch.Tensor, tables: StepTables, out: torch.Tensor
) -> Bound | None:
    """`lightning_indexer` to out int32 [T, topk], bound to its operands; None for those that it would have to copy.

    What `tables` hold has been looked at when they were filled, for this cache.
    """
    check(q, k_cache, weights, tables.batch, out.shape[1])
    tables.require(k_cache)
    plain = _whole_rows(q) is q and _whole_rows(k_cache) is k_cache and weights.dtype == torch.float32
    require_shape("out", out, (len(q), None))
    if not plain or out.dtype != torch.int32 or not out.is_contiguous():
        return None
    rows = out.numpy()
    call = _call(q, k_cache, weights.numpy(), np.empty((0, 0), np.float32), tables.readable, tables.wide_table, rows)

    def run() -> None:
        rows.fill(-1)
        _run(tables.once(_tasks_of), call)

    return Bound([run], (out,), q, k_cache, call)


def _tasks_of(tables: StepTables) -> list[Task]:
    return _tasks(tables.starts, tables.readable.tolist())


def _call(
    q: torch.Tensor, k_cache: torch.Tensor, weights: Any, scales: Any, visible: Any, table: Any, out: Any
) -> IndexerCall:
    dim = q.shape[2]
    pairs = PAIRS and q.dtype == k_cache.dtype == torch.bfloat16 and not dim % (2 * WIDTH)
    pairs |= q.dtype == torch.bfloat16 and k_cache.dtype == torch.int8  # made for AMX alone
    keys = row_address(k_cache, PAIRED if k_cache.dtype == torch.bfloat16 and pairs else None)
    return IndexerCall(
        row_address(q, PAIRED if pairs else None), dim // (2 if pairs else 1), weights, visible, table, keys,
        k_cache.shape[1], scales, out,
    )  # fmt: skip


def _tasks(starts: list[int], seen: list[int]) -> list[Task]:
    """Of requests whose tokens begin at `starts`; seen: positions that each token sees."""
    tasks: list[Task] = []
    for request, (start, end) in enumerate(itertools.pairwise(starts)):
        length = seen[end - 1] if end > start else 0
        size = min(TOKENS, max(1, SCORES // max(length, 1)))
        if length > 0:
            for first in range(start, end, size):
                last = min(first + size, end)
                tasks.append(Task(request, first, last, seen[last - 1], 0, seen[last - 1], True))
    return tasks


def _run(tasks: list[Task], call: IndexerCall) -> None:
    threads = torch.get_num_threads()
    if len(tasks) < threads:
        for task in tasks:
            _choose_with_all_threads(task, call)
        return
    size = len(tasks) if threads == 1 else max(1, len(tasks) // (4 * threads))
    parts = [tasks[number : number + size] for number in range(0, len(tasks), size)]
    kernel = _kernel(call)
    each(lambda number: kernel(np.array(parts[number]), call, _room(parts[number])), len(parts))


def _kernel(call: IndexerCall) -> Callable[..., object]:
    by_amx = call.query.kind == PAIRED and _fits_amx(call.weights.shape[1], 2 * call.dims, call.block_size)
    kernel: Callable[..., object] = choose_by_amx if by_amx else choose
    return kernel


def _fits_amx(heads: int, dims: int, block_size: int) -> bool:
    """Whether AMX takes queries of so many heads and dims, and keys in such blocks."""
    return AMX and amx.fits(dims) and not heads % amx.TILE and not block_size % amx.TILE


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
        run(np.array([part]), step, scores)

    run = _kernel(step)
    each(score_part, -(-task.length // SPAN))
    run(np.array([task._replace(stop=0)]), step, scores)
