"""The inputs of the parity suite for the ops that GLM-5.3-Flash adds: KDA, pools of index keys, mHC."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from glm5_kernels.parity.compare import Tolerance
from glm5_kernels.parity.inputs import BATCHES, INDEX_DIM, POOL, Case, paged_batch, paged_cache, sums

KDA_HEADS, KDA_DIM = 3, 128
#: Tokens of each sequence, and those after which its state is written: the last one or, of drafts, all.
SEQUENCES = {
    "decode": ([1, 1, 1], False),
    "drafts": ([4, 6, 1], True),
    "prefill": ([70], False),
    "mixed": ([33, 0, 1, 17], False),
    "short and empty": ([1, 0, 2], False),
}


def _kda(generator: torch.Generator) -> Iterator[Case]:
    for dtype, (name, (lengths, drafts)) in itertools.product((torch.float32, torch.bfloat16), SEQUENCES.items()):
        tokens, heads = sum(lengths), (KDA_HEADS, KDA_DIM)
        q, k, v = (torch.randn(tokens, *heads, generator=generator).to(dtype) for _ in range(3))
        g = -5 * torch.sigmoid(3 * torch.randn(tokens, *heads, generator=generator))
        beta = torch.rand(tokens, KDA_HEADS, generator=generator)
        starts = torch.tensor([0, *lengths]).cumsum(0).int()
        slots = torch.randperm(tokens + len(lengths) + 1, generator=generator).int()
        initial, written = slots[: len(lengths)].clone(), slots[len(lengths) : -1].clone()
        initial[0] = -1 if name != "decode" else initial[0]
        if not drafts:
            written[~torch.isin(torch.arange(tokens), starts[1:] - 1)] = -1
        states = torch.randn(len(slots), *heads, KDA_DIM, generator=generator)
        tolerance = Tolerance(1e-5, 1e-5, "rows of a state added in another order")
        outputs = ("out", sums(dtype, KDA_DIM)), ("states", tolerance)
        arguments = q, k, v, g, beta, states, starts, initial, written
        yield Case("kda", f"{name}, {str(dtype)[6:]}", arguments, outputs)


def _pools(generator: torch.Generator) -> Iterator[Case]:
    for dtype, (name, requests) in itertools.product((torch.float32, torch.bfloat16), BATCHES.items()):
        batch, ring = paged_batch(requests, generator), 3 * POOL
        tokens = int(batch.query_start_loc[-1])
        k, gate = torch.randn(2, tokens, INDEX_DIM, generator=generator).to(dtype)
        rings = torch.randperm(len(requests) + 1, generator=generator)[: len(requests)].int()
        tail = torch.randn(len(requests) + 1, 2, ring, INDEX_DIM, generator=generator).to(dtype)
        cache = paged_cache(batch.block_table, INDEX_DIM, dtype, generator)
        ape = torch.randn(POOL, INDEX_DIM, generator=generator)
        outputs = ("tail_cache", Tolerance(0.0, 0.0, "copies")), ("pool_cache", sums(dtype, POOL))
        arguments = k, gate, ape, batch, rings, tail, cache
        yield Case("indexer_pool", f"{name}, {str(dtype)[6:]}", arguments, outputs)


def mhc_operands(
    tokens: int, n: int, columns: int, dtype: torch.dtype, joins: bool, generator: torch.Generator
) -> tuple[Any, ...]:
    """Operands of `mhc` whose sigmoids and softmax are neither all flat nor all saturated."""

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    maps = n * (n + 2)
    before = (randn(tokens, columns).to(dtype), randn(tokens, n).abs(), randn(tokens, n, n).softmax(-1))
    return (
        randn(tokens, n, columns).to(dtype), *(before if joins else (None, None, None)),
        randn(maps, n * columns) * (n * columns) ** -0.5, 1 + randn(3).abs(), randn(maps),
        (1 + randn(columns) / 4).to(dtype), 1e-5, 1e-6, 20, 1e-5,
    )  # fmt: skip


def _streams(generator: torch.Generator) -> Iterator[Case]:
    variants = ((1, 4, True), (1, 4, False), (8, 4, True), (37, 4, True), (8, 2, False), (8, 3, True))
    for dtype, (tokens, n, joins) in itertools.product((torch.float32, torch.bfloat16), variants):
        weights = Tolerance(1e-5, 1e-5, "sums of rows, exponentials and Sinkhorn's steps in fp32")
        names, joined, entered = ("streams", "post", "comb", "input"), sums(torch.float32, n), sums(dtype, 64)
        outputs = tuple(zip(names, (joined, weights, weights, entered), strict=True))
        variant = f"{str(dtype)[6:]}, {tokens} tokens, {n} streams" + (", joined" if joins else "")
        yield Case("mhc", variant, mhc_operands(tokens, n, 1040, dtype, joins, generator), outputs)


#: As in `cases.cases`.
MAKERS: tuple[tuple[set[str], Callable[[torch.Generator], Iterator[Case]]], ...] = (
    ({"kda"}, _kda),
    ({"indexer_pool"}, _pools),
    ({"mhc"}, _streams),
)
