"""What the cases of the parity suite share: shapes, requests, paged caches and the tolerance of sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from glm5_kernels.paged_cache import PagedBatch
from glm5_kernels.parity.compare import Tolerance

#: GLM-5's head shapes; layers are narrower than its 6144, so that the references take seconds.
HEADS, RANK, ROPE, NOPE, Q_LORA, HIDDEN = 64, 512, 64, 192, 256, 512
INDEX_HEADS, INDEX_DIM, BLOCK, POOL = 32, 128, 128, 4
BATCHES = {  # (length, query tokens) per request
    "decode": [(700, 1), (129, 1), (64, 1)],
    "prefill": [(160, 160)],
    "chunk": [(900, 40)],
    "mixed": [(520, 1), (40, 40), (260, 3)],
    "MTP": [(400, 4), (77, 4)],
    "short and empty": [(1, 1), (0, 1), (5, 5)],
}


@dataclass(frozen=True)
class Case:
    """Arguments of one variant of an op.

    Attributes:
        arguments: as the op's function takes them.
        outputs: name and tolerance of every result that is compared as values, and of every argument that is written.
        gap: for positions selected by the indexer: score distance within which positions may be swapped.
    """

    op: str
    variant: str
    arguments: tuple[Any, ...]
    outputs: tuple[tuple[str, Tolerance], ...] = ()
    gap: float | None = None


def paged_batch(requests: list[tuple[int, int]], generator: torch.Generator) -> PagedBatch:
    """Blocks in random order, one unused block, and a table wider than needed."""
    blocks = [-(-length // BLOCK) for length, _ in requests]
    order = torch.randperm(sum(blocks) + 1, generator=generator)[1:].int()
    table = torch.full((len(requests), max(blocks) + 1), -1, dtype=torch.int32)
    for row, (first, count) in enumerate(zip([sum(blocks[:i]) for i in range(len(blocks))], blocks, strict=True)):
        table[row, :count] = order[first : first + count]
    starts = torch.tensor([0, *[new for _, new in requests]]).cumsum(0).int()
    return PagedBatch(starts, torch.tensor([length for length, _ in requests], dtype=torch.int32), table)


def paged_cache(table: torch.Tensor, columns: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """A paged cache of random rows that has the blocks of `table`."""
    return torch.randn(int(table.max()) + 2, BLOCK, columns, generator=generator).to(dtype)


def sums(dtype: torch.dtype, length: int) -> Tolerance:
    """The tolerance for two summation orders of `length` terms of size one, and one rounding to `dtype`."""
    ulp = torch.finfo(dtype).eps
    return Tolerance(1e-6 * length**0.5, ulp, f"{length} terms in fp32, one ULP of {str(dtype)[6:]}")
