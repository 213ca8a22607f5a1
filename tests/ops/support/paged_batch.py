"""Test batches in paged form: shuffled blocks, ragged requests, everything unused filled with NaN."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from glm5_kernels.ops import PagedBatch


@dataclass
class RaggedBatch:
    """B requests; `lengths[b]` rows (this step's included), the last `new[b]` of them are this step's queries."""

    lengths: list[int]
    new: list[int]
    block_size: int
    block_table: torch.Tensor
    num_blocks: int

    @property
    def paged(self) -> PagedBatch:
        starts = torch.tensor([0, *self.new]).cumsum(0).to(torch.int32)
        return PagedBatch(starts, torch.tensor(self.lengths, dtype=torch.int32), self.block_table)

    @property
    def num_tokens(self) -> int:
        return sum(self.new)

    def cache(self, rows: list[torch.Tensor]) -> torch.Tensor:
        """[num_blocks, block_size, D] with rows[b] [L_b, D] at request b's places and NaN, or -1, everywhere else."""
        dim, dtype = rows[0].shape[1], rows[0].dtype
        unused = float("nan") if dtype.is_floating_point else -1
        cache = torch.full((self.num_blocks, self.block_size, dim), unused, dtype=dtype)
        for b, request_rows in enumerate(rows):
            for position, row in enumerate(request_rows):
                cache[self.block_table[b, position // self.block_size], position % self.block_size] = row
        return cache

    def tokens(self) -> list[tuple[int, int]]:
        """(request, number of visible positions) of each query token."""
        return [
            (b, length - new + i + 1)
            for b, (length, new) in enumerate(zip(self.lengths, self.new, strict=True))
            for i in range(new)
        ]


def paged_batch(lengths: list[int], new: list[int], block_size: int = 4, seed: int = 0) -> RaggedBatch:
    """Blocks are dealt out in random order; unused entries of the block table are -1."""
    needed = [-(-length // block_size) for length in lengths]
    num_blocks = sum(needed) + 2  # two blocks nobody owns
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
    table = torch.full((len(lengths), max([*needed, 1])), -1, dtype=torch.int32)
    for b, count in enumerate(needed):
        for i in range(count):
            table[b, i] = order.pop()
    return RaggedBatch(lengths, new, block_size, table, num_blocks)
