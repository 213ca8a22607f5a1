"""Scores and selection of the Lightning Indexer by vectors, STEP keys at a time."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import float32, int64

from glm5_kernels.compiled.jit import inner, kernel
from glm5_kernels.compiled.lightning_indexer_intrinsics import (
    KEYS,
    scores_of_keys,
    scores_of_pairs,
    scores_of_pairs_of_one_group,
)
from glm5_kernels.compiled.rows import PAIRED, load_row_as_fp32, transpose
from glm5_kernels.compiled.simd import FP32, STEP, WIDTH, aligned_fp32, in_steps
from glm5_kernels.compiled.topk import best_positions

#: Rows of keys are prefetched this many keys ahead: memory answers after some thousand cycles.
PREFETCH_DISTANCE = 96


class IndexerWorkspace(NamedTuple):
    """Memory of a thread. The caller owns it: compiled code reads it by address.

    Attributes:
        scores: fp32, the scores of the largest task.
        weights: fp32 [tokens, lanes], a lane for each head; padding is 0. Tokens fill whole blocks of STEP lanes.
        query: fp32 [tokens * lanes * dims].
        keys: fp32 [STEP * dims], keys converted to fp32.
    """

    scores: Any
    weights: Any
    query: Any
    keys: Any


def new_workspace(scores: Any, tokens: int, heads: int, dims: int) -> IndexerWorkspace:
    lanes = in_steps(heads) if heads > WIDTH else WIDTH
    tokens = in_steps(tokens * lanes) // lanes
    aligned = aligned_fp32
    return IndexerWorkspace(
        scores, np.zeros((tokens, lanes), np.float32), aligned(tokens * lanes * dims), aligned(STEP * dims)
    )


@kernel
def select(tasks: Any, operands: Any, workspace: Any) -> None:
    """Score the keys of the tasks (records with the fields of `Task`), and select where all keys are scored."""
    for number in range(len(tasks)):
        task = tasks[number]
        pitch = in_steps(task.length)
        if task.start < task.stop:
            _score(operands, task, workspace, pitch)
        if task.selects:
            select_best(workspace.scores, pitch, operands, task)


@inner
def _score(operands: Any, task: Any, workspace: Any, pitch: Any) -> None:
    """workspace.scores [tokens, pitch], columns start..stop; a missing key's score is NaN.

    Scores may be written up to the next multiple of STEP.
    """
    start, stop, tokens = task.start, task.stop, task.last - task.first
    dims, heads, lanes = operands.dims, operands.weights.shape[1], workspace.weights.shape[1]
    tokens_per_block, blocks = STEP // min(STEP, lanes), -(-lanes // STEP)
    _lay_out_heads(operands, task, workspace)
    rows, visible = operands.keys, operands.visible
    addresses, scale, is_plain = find_keys(operands, task)
    prefetch_stride = -(-KEYS * rows.row_pitch // (blocks * dims))
    # As numbers: numba counts references at each use of an array, and ten counts take as long as a key's scores.
    query, weights = workspace.query.ctypes.data, workspace.weights.ctypes.data
    scores, keys, all_addresses = workspace.scores.ctypes.data, workspace.keys.ctypes.data, addresses.ctypes.data
    for first in range(start, stop, STEP):
        count, index = min(STEP, stop - first), first - start
        prefetch = addresses[min(index + PREFETCH_DISTANCE, stop - start - 1)]
        if rows.kind != PAIRED and rows.kind != FP32:
            for key in range(count):
                load_row_as_fp32(addresses[index + key], dims, rows.kind, keys + 4 * key * dims, STEP)
                addresses[index + key] = keys + 4 * key * dims
        for token in range(0, tokens, tokens_per_block):
            last = min(token + tokens_per_block, tokens) - 1
            seen, token_pitch = min(count, visible[task.first + last] - first), 4 * pitch * (last - token)
            q, w = query + 4 * token * lanes * dims, weights + 4 * token * lanes
            for key in range(0, seen, KEYS):
                key_rows, out = all_addresses + 8 * (index + key), scores + 4 * (token * pitch + first + key)
                ahead = prefetch + key * rows.row_pitch
                if rows.kind == PAIRED and token_pitch == 0 and heads <= WIDTH:
                    scores_of_pairs_of_one_group(
                        key_rows, q, w, heads, blocks, dims, out, token_pitch, ahead, prefetch_stride
                    )
                elif rows.kind == PAIRED:
                    scores_of_pairs(key_rows, q, w, heads, blocks, dims, out, token_pitch, ahead, prefetch_stride)
                else:
                    scores_of_keys(key_rows, q, w, heads, blocks, dims, out, token_pitch, ahead, prefetch_stride)
            if not is_plain:
                for base in range(token * pitch + first, (last + 1) * pitch + first, pitch):
                    for key in range(seen):
                        workspace.scores[base + key] *= scale[index + key]


@inner
def _lay_out_heads(operands: Any, task: Any, workspace: Any) -> None:
    """A lane for each head: workspace.query <- [blocks of all tokens, dims, STEP], and weights."""
    rows, dims, heads, weights = operands.query, operands.dims, operands.weights.shape[1], workspace.weights
    kind = FP32 if rows.kind == PAIRED else rows.kind  # pairs move as 32 bits
    heads_of_group, tokens = np.empty(WIDTH, np.int64), task.last - task.first
    for token in range(tokens):
        base = rows.base + (task.first + token) * rows.block_pitch
        for head in range(heads):
            weights[token, head] = operands.weights[task.first + token, head]
        for first in range(0, weights.shape[1], WIDTH):
            for lane in range(WIDTH):
                heads_of_group[lane] = base + min(first + lane, heads - 1) * rows.row_pitch
            group = token * weights.shape[1] + first
            target = workspace.query.ctypes.data + 4 * (group // STEP * STEP * dims + group % STEP)
            transpose(heads_of_group.ctypes.data, 0, dims, kind, target, STEP)
    for token in range(tokens, len(weights)):  # of an earlier task
        for head in range(heads):
            weights[token, head] = float32(0)


@inner
def find_keys(operands: Any, task: Any) -> Any:
    """Addresses (int64) and scales of a task's keys, and whether all scales are 1. A missing key's scale is NaN.

    Addresses are padded to a multiple of STEP by repeating the last one.
    """
    rows, scales, table = operands.keys, operands.key_scale, operands.block_table[task.request]
    count, scaled, block_size = task.stop - task.start, scales.size > 0, operands.block_size
    addresses, scale = np.empty(in_steps(count), np.int64), np.empty(count, np.float32)
    index, offset, is_plain = task.start // block_size, task.start % block_size, not scaled
    for key in range(len(addresses)):
        block = table[index] if index < len(table) else int64(-1)
        addresses[key] = rows.base + max(block, int64(0)) * rows.block_pitch + offset * rows.row_pitch
        if key < count:
            scale[key] = float32(np.nan) if block < 0 else scales[block, offset] if scaled else float32(1)
            is_plain = is_plain and block >= 0
        if key < count - 1:
            offset += 1  # incremented: a division takes as long as many products
        if offset == block_size:
            index, offset = index + 1, int64(0)
    return addresses, scale, is_plain


@inner
def select_best(scores: Any, pitch: Any, operands: Any, task: Any) -> None:
    """operands.out of the task's tokens <- the best positions visible to each; scores [tokens, pitch]."""
    scratch = np.empty(2 * (pitch + WIDTH), np.uint32)
    for token in range(task.first, task.last):
        visible = max(int64(0), operands.visible[token])
        best_positions(scores, (token - task.first) * pitch, visible, operands.out, token, scratch)
