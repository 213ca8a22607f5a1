"""Where the rows of a paged cache are: from request positions to physical rows of (strided) caches."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from glm5_kernels.errors import KernelInputError, require_integers, require_shape

#: Positions are returned as int32.
LONGEST = 2**31 - 1


class PagedBatch(NamedTuple):
    """B requests with T query tokens together, whose keys lie in the blocks of a paged cache.

    Query tokens of one request follow each other and are aligned to its end: query i of n sees positions
    0 .. seq_len - n + i. Position p of request b is row p % block_size of block block_table[b, p // block_size].

    Attributes:
        query_start_loc: int [B + 1], prefix sums of the query tokens per request, from 0 to T.
        seq_lens: int [B], length of each request including this step's tokens; 0 for a padding request.
        block_table: int [B, max_blocks], -1 where there is no block; positions in a missing block are never read.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor


def check_blocks(batch: PagedBatch, num_blocks: int, block_size: int) -> None:
    """Raise `KernelInputError` unless block_table [B, *] names blocks of the cache as far as the requests reach.

    Compiled code reads the cache by address: what is not refused here would be read outside of it. On a device the
    operators look themselves, and asking would wait for it.
    """
    table = batch.block_table
    require_shape("query_start_loc", batch.query_start_loc, (None,))
    require_shape("seq_lens", batch.seq_lens, (None,))
    require_shape("block_table", table, (len(batch.seq_lens), None))
    require_integers("block_table", table)
    require_integers("seq_lens", batch.seq_lens)
    require_integers("query_start_loc", batch.query_start_loc)
    if table.device.type != "cpu" or not table.numel():
        return
    if block_size < 1:
        raise KernelInputError("the cache has blocks of 0 rows")
    lengths = _Content.of(batch.seq_lens)
    longest, columns = _reach(lengths, block_size)
    if longest > LONGEST:
        raise KernelInputError(f"seq_lens holds {longest}, positions are int32")
    worst = _last_block(lengths, _Content.of(table[:, :columns]), block_size)
    if worst >= num_blocks:
        raise KernelInputError(f"block_table names block {worst}, the cache has {num_blocks}")


class _Content(NamedTuple):
    """An array as a key: what is found of one is the same for the next of equal numbers."""

    dtype: Any
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, x: torch.Tensor) -> _Content:
        array = x.numpy()
        return cls(array.dtype, array.shape, array.tobytes())

    def array(self) -> Any:
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


# All layers of a step ask the same of the same numbers, which would take them as long as their products.
@lru_cache(maxsize=4)
def _reach(lengths: _Content, block_size: int) -> tuple[int, int]:
    """The longest request, and its blocks: what lies behind in a table may be left over from other requests."""
    longest = int(lengths.array().max())
    return longest, max(0, -(-longest // block_size))


@lru_cache(maxsize=4)
def _last_block(lengths: _Content, table: _Content, block_size: int) -> int:
    """The largest block that requests of these lengths reach in their tables."""
    used = -(-lengths.array().astype(np.int64) // block_size)
    return int(np.where(np.arange(table.shape[1]) < used[:, None], table.array(), -1).max(initial=-1))


def check_slots(slot_mapping: torch.Tensor, cache: torch.Tensor) -> None:
    """Raise `KernelInputError` unless every slot is a row of cache [num_blocks, block_size, D], or negative."""
    require_integers("slot_mapping", slot_mapping)
    last = int(slot_mapping.max()) if slot_mapping.numel() else -1
    if last >= cache.shape[0] * cache.shape[1]:
        raise KernelInputError(f"slot {last} is outside the cache of {list(cache.shape)}")


def readable(visible: torch.Tensor, batch: PagedBatch, block_size: int) -> torch.Tensor:
    """visible [T] of `query_layout`, without the positions that block_table has no room for: they have no key."""
    return visible.clamp_max(batch.block_table.shape[1] * block_size)


def query_layout(batch: PagedBatch, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which request each query token belongs to, and how many positions it may see.

    Returns:
        request int64 [T], visible int64 [T]; visible <= 0 means the token sees nothing.
    Raises:
        KernelInputError: query_start_loc does not divide `num_tokens` among the requests of seq_lens.
    """
    # On the host: a dozen operations on a few numbers, which as tensors would take as long as attention itself.
    request, visible = _layout(_Content.of(batch.query_start_loc.cpu()), _Content.of(batch.seq_lens.cpu()), num_tokens)
    device = batch.query_start_loc.device
    return torch.from_numpy(request.copy()).to(device), torch.from_numpy(visible.copy()).to(device)


@lru_cache(maxsize=4)
def _layout(starts_of: _Content, lengths_of: _Content, num_tokens: int) -> tuple[Any, Any]:
    """`query_layout` of arrays."""
    starts, lengths = starts_of.array().astype(np.int64), lengths_of.array().astype(np.int64)
    ends = len(starts) == len(lengths) + 1 and starts[0] == 0 and starts[-1] == num_tokens
    if not ends or (np.diff(starts) < 0).any():
        raise KernelInputError(
            f"query_start_loc {starts.tolist()} must rise from 0"
            f" to the {num_tokens} query tokens in {len(lengths) + 1} entries"
        )
    request = np.repeat(np.arange(len(lengths)), np.diff(starts))  # [T]
    return request, lengths[request] - starts[1:][request] + np.arange(num_tokens) + 1


class StepTables:
    """What one step's `PagedBatch` and slots say of T query tokens, in arrays that stay where they are.

    For ops that are bound to them: what is looked at once is read by all layers of a step. Of T requests at most, in
    caches with as many blocks, and as large ones, as `cache` [num_blocks, block_size, *].

    Attributes:
        slots: int64 [T], a tensor. batch: what they were filled with, at first nothing.
        request, visible: int64 [T] (`query_layout`). readable: see there. starts: query_start_loc.
        block_table: int32 [T, max_blocks], wide_table: the same in int64.
    """

    def __init__(self, tokens: int, max_blocks: int, cache: torch.Tensor) -> None:
        self.slots = torch.full((tokens,), -1, dtype=torch.int64)
        self.request, self.visible, self.readable = (np.zeros(tokens, np.int64) for _ in range(3))
        self.block_table = np.full((tokens, max_blocks), -1, np.int32)
        self.wide_table = np.full((tokens, max_blocks), -1, np.int64)
        self.starts: list[int] = []
        self.batch = PagedBatch(*(torch.zeros(shape, dtype=torch.int32) for shape in ((1,), (0,), (0, max_blocks))))
        self._cache, self._key = cache, tuple[bytes, ...]()
        self._made: dict[Callable[[StepTables], Any], Any] = {}

    def require(self, cache: torch.Tensor) -> None:
        """Raise `KernelInputError` unless the tables were made for the blocks of this cache."""
        require_shape("cache", cache, (*self._cache.shape[:2], None))

    def fits(self, batch: PagedBatch) -> bool:
        """Whether `fill` takes a batch: no more requests than tokens, block tables as wide as these."""
        shape, mine = batch.block_table.shape, self.block_table.shape
        return shape[0] <= mine[0] and shape[1] == mine[1] and batch.block_table.dtype == torch.int32

    def fill(self, batch: PagedBatch, slots: torch.Tensor) -> None:
        """Look at a step's numbers and hold them; nothing to do for those that are held.

        Raises:
            KernelInputError: they name what the cache does not have, or do not fit these tables.
        """
        key = tuple(x.numpy().tobytes() for x in (slots, *batch))
        if key == self._key:
            return
        self._key = ()
        tokens, requests = len(self.slots), len(batch.seq_lens)
        require_shape("slot_mapping", slots, (tokens,))
        check_slots(slots, self._cache)
        check_blocks(batch, *self._cache.shape[:2])
        request, visible = query_layout(batch, tokens)
        self.slots.copy_(slots)
        self.request[:], self.visible[:] = request.numpy(), visible.numpy()
        self.readable[:] = readable(visible, batch, self._cache.shape[1]).numpy()
        self.block_table[:requests] = self.wide_table[:requests] = batch.block_table.numpy()
        self.starts, self.batch, self._made, self._key = batch.query_start_loc.tolist(), batch, {}, key

    def once(self, make: Callable[[StepTables], Any]) -> Any:
        """make(self), the same until other numbers are held."""
        if make not in self._made:
            self._made[make] = make(self)
        return self._made[make]


def physical_rows(positions: torch.Tensor, block_tables: torch.Tensor, block_size: int) -> torch.Tensor:
    """Rows of the flattened cache for positions [t, K] >= 0, given one block table [t, max_blocks] per token.

    A position beyond the table, or whose block is negative, has no row: -1. Never reads outside the table.
    """
    block = positions // block_size
    inside = block < block_tables.shape[1]
    block = block_tables.long().gather(1, block.clamp_max(max(block_tables.shape[1] - 1, 0)))
    rows = block * block_size + positions % block_size
    return torch.where(inside & (block >= 0), rows, -1)


def cache_rows(cache: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """cache [num_blocks, block_size, D] (any strides), rows [...] >= 0 -> [..., D]."""
    block_size = cache.shape[1]
    return cache[rows // block_size, rows % block_size]


def write_rows(cache: torch.Tensor, slot_mapping: torch.Tensor, values: torch.Tensor) -> None:
    """cache [num_blocks, block_size, D]: row slot_mapping[i] = values[i]; negative slots (padding) are skipped."""
    slots = slot_mapping.long()
    if bool((slots < 0).any()):
        keep = slots >= 0
        slots, values = slots[keep], values[keep]
    block_size = cache.shape[1]
    cache[slots // block_size, slots % block_size] = values.to(cache.dtype)


def queries_in_a_row(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [B, S, ...] (BSND) -> [B * S, ...] (TND) and query_start_loc int32 [B + 1]."""
    batch, length = x.shape[:2]
    return x.flatten(0, 1), torch.arange(batch + 1, dtype=torch.int32, device=x.device) * length


def keys_in_pages(x: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x [B, S, D] (BSND without its one head) as a cache [B * S / block_size, block_size, D] and its block_table.

    Raises:
        KernelInputError: S is no multiple of block_size.
    """
    batch, length, dim = x.shape
    if length % block_size:
        raise KernelInputError(f"{length} keys per request do not fill blocks of {block_size}: pad them")
    blocks = torch.arange(batch * length // block_size, dtype=torch.int32, device=x.device)
    return x.reshape(-1, block_size, dim), blocks.view(batch, -1)
