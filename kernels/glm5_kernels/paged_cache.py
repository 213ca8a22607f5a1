"""Paged caches: from positions of a request to physical rows of (strided) caches, and checks of the tables."""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from glm5_kernels.contract import largest
from glm5_kernels.errors import KernelInputError

#: Positions are int32.
MAX_POSITIONS = 2**31 - 1


class PagedBatch(NamedTuple):
    """B requests with T query tokens together, whose keys lie in the blocks of a paged cache.

    Query tokens of one request follow each other and are aligned to its end: query i of n sees positions
    0 .. seq_len - n + i. Position p of request b is row p % block_size of block block_table[b, p // block_size].

    Attributes:
        query_start_loc: [B + 1], prefix sums of the query tokens per request, from 0 to T.
        seq_lens: length of each request including this step's tokens; 0 for a padding request.
        block_table: -1 where there is no block; positions in a missing block are never read.
    """

    query_start_loc: Annotated[Tensor, "int [starts]"]
    seq_lens: Annotated[Tensor, "int [B]"]
    block_table: Annotated[Tensor, "int [B, max_blocks]"]


def pooled(batch: PagedBatch, pool: int) -> PagedBatch:
    """The batch with the lengths in complete pools of `pool` tokens, which are what the blocks of its table hold."""
    return batch if pool == 1 else batch._replace(seq_lens=batch.seq_lens // pool)


def check_blocks(batch: PagedBatch, num_blocks: int, block_size: int) -> None:
    """Raise `KernelInputError` unless the blocks that the requests read exist in the cache.

    Compiled code reads the cache by address: a wrong block would be read outside of it. On a device the operators check
    themselves, and a check here would wait for the device.
    """
    table = batch.block_table
    if table.device.type != "cpu" or not table.numel():
        return
    if block_size < 1:
        raise KernelInputError("the cache has blocks of 0 rows")
    lengths = ArrayKey.of(batch.seq_lens)
    longest = _longest(lengths)
    if longest > MAX_POSITIONS:
        raise KernelInputError(f"seq_lens holds {longest}, positions are int32")
    columns = max(0, -(-longest // block_size))  # later columns may be left over from other requests
    last_block = _last_block(lengths, ArrayKey.of(table[:, :columns]), block_size)
    if last_block >= num_blocks:
        raise KernelInputError(f"block_table names block {last_block}, the cache has {num_blocks}")


class ArrayKey(NamedTuple):
    """The content of an array as a cache key."""

    data: bytes
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, x: torch.Tensor) -> ArrayKey:
        array = x.numpy()
        return cls(array.tobytes(), array.dtype.char, array.shape)

    def array(self) -> Any:
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


# All layers of a step check the same tables; without the caches that would take as long as their products.
@lru_cache(maxsize=4)
def _last_block(lengths: ArrayKey, table: ArrayKey, block_size: int) -> int:
    """The largest block number among the blocks that requests of these lengths read."""
    used = -(-lengths.array().astype(np.int64) // block_size)
    return int(np.where(np.arange(table.shape[1]) < used[:, None], table.array(), -1).max(initial=-1))


@lru_cache(maxsize=4)
def _longest(lengths: ArrayKey) -> int:
    return int(lengths.array().max(initial=0))


def check_slots(slot_mapping: torch.Tensor, cache: torch.Tensor) -> None:
    """Raise `KernelInputError` unless every slot is a row of cache [num_blocks, block_size, D], or negative."""
    last = largest(slot_mapping)
    if last >= cache.shape[0] * cache.shape[1]:
        raise KernelInputError(f"slot {last} is outside the cache of {list(cache.shape)}")


def readable(visible: torch.Tensor, batch: PagedBatch, block_size: int) -> torch.Tensor:
    """visible [T] of `query_layout`, limited to the positions that fit block_table: later ones have no key."""
    return visible.clamp_max(batch.block_table.shape[1] * block_size)


def query_layout(batch: PagedBatch, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Map each query token to its request, and to the number of positions that it may see.

    Returns:
        request int64 [T], visible int64 [T]; visible <= 0 means the token sees nothing. Calls share them: do not write.
    Raises:
        KernelInputError: query_start_loc does not divide `num_tokens` among the requests of seq_lens.
    """
    # On the host: a dozen operations on a few numbers, which as tensors would take as long as attention itself.
    device, (starts, lengths) = batch.query_start_loc.device, (x.cpu() for x in batch[:2])
    request, visible = _layout(ArrayKey.of(starts), ArrayKey.of(lengths), num_tokens)
    return (request, visible) if device.type == "cpu" else (request.to(device), visible.to(device))


@lru_cache(maxsize=4)
def _layout(starts_of: ArrayKey, lengths_of: ArrayKey, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    starts, lengths = starts_of.array().astype(np.int64), lengths_of.array().astype(np.int64)
    ends = len(starts) == len(lengths) + 1 and starts[0] == 0 and starts[-1] == num_tokens
    if not ends or (np.diff(starts) < 0).any():
        raise KernelInputError(
            f"query_start_loc {starts.tolist()} must rise from 0"
            f" to the {num_tokens} query tokens in {len(lengths) + 1} entries"
        )
    request = np.repeat(np.arange(len(lengths)), np.diff(starts))  # [T]
    visible = lengths[request] - starts[1:][request] + np.arange(num_tokens) + 1
    return torch.from_numpy(request), torch.from_numpy(visible)


def physical_rows(positions: torch.Tensor, block_tables: torch.Tensor, block_size: int) -> torch.Tensor:
    """Rows of the flattened cache for positions [t, K] >= 0, given one block table [t, max_blocks] per token.

    A position beyond the table, or whose block is negative, has no row: -1. Never reads outside the table.
    """
    if not block_tables.shape[1]:
        return torch.full_like(positions, -1)
    block = positions // block_size
    inside = block < block_tables.shape[1]
    block = block_tables.long().gather(1, block.clamp_max(block_tables.shape[1] - 1))
    rows = block * block_size + positions % block_size
    return torch.where(inside & (block >= 0), rows, -1)


def cache_rows(cache: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """cache [num_blocks, block_size, D] (any strides), rows [...] >= 0 -> [..., D]; zeros of a cache without blocks."""
    block_size = cache.shape[1]
    if not len(cache):
        return cache.new_zeros(*rows.shape, cache.shape[2])
    return cache[rows // block_size, rows % block_size]


def write_rows(cache: torch.Tensor, slot_mapping: torch.Tensor, values: torch.Tensor) -> None:
    """cache [num_blocks, block_size, D]: row slot_mapping[i] = values[i]; negative slots (padding) are skipped."""
    slots = slot_mapping.long()
    if bool((slots < 0).any()):
        keep = slots >= 0
        slots, values = slots[keep], values[keep]
    block_size = cache.shape[1]
    cache[slots // block_size, slots % block_size] = values.to(cache.dtype)
