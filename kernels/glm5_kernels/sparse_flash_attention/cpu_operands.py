"""What the loop of Sparse Flash Attention works on, as numba takes it: addresses, buffers, sizes of a tile."""

from __future__ import annotations

from typing import Any, NamedTuple

from glm5_kernels.compiled.rows import RowAddress

#: Keys of a tile: with 512 + 64 columns the tile, its transposed copy, the query and the output fit a 1 MiB cache.
TILE = 64
#: Columns of the queries multiplied with a tile at a time: 128 of 32 keys are 16 KiB.
DEPTH = 128


class Queries(NamedTuple):
    """Queries of all tokens: rows (token, head) of both parts, and the heads of a token."""

    nope: RowAddress
    pe: RowAddress
    heads: int


class Caches(NamedTuple):
    """Rows (block, offset) of the latents and of the rotated keys, both of one kind of element.

    rank, rope: their columns, padded to whole lanes.
    """

    ckv: RowAddress
    kpe: RowAddress
    block_size: int
    rank: int
    rope: int


class ChosenKeys(NamedTuple):
    """topk_indices int32 [T, K], visible and request int64 [T] (`query_layout`), block_table int32 [B, max_blocks]."""

    topk_indices: Any
    visible: Any
    request: Any
    block_table: Any


class SoftmaxOptions(NamedTuple):
    """scale: of the scores. round_probs: 1 if probabilities are rounded to bf16 before they meet the values."""

    scale: float
    round_probs: int


class Tile(NamedTuple):
    """Buffers of a task: one tile of keys and what a token has summed so far; H is heads, a multiple of HEADS.

    Where the caches are PAIRED, two bf16 columns share the 32 bits of an element: D = (rank + rope) / 2, else
    D = rank + rope. `keys` and `values` lie in pieces of STEP columns, so that a piece stays in the nearest cache for
    all heads.

    Attributes:
        query: [H, D]. keys: [D * TILE], transposed. values: [rank * TILE].
        scores: [H, TILE]. mixed: [H, rank], the weighted sum of values. peak, total: [H], of the softmax.
        ckv_rows, kpe_rows: int64 [K + STEP], addresses of the chosen rows.
        latents, rotated: [TILE, rank] and [TILE, rope], unpacked rows; latent_rows, rotated_rows: int64 [TILE], theirs.
    """

    query: Any
    keys: Any
    values: Any
    scores: Any
    mixed: Any
    peak: Any
    total: Any
    ckv_rows: Any
    kpe_rows: Any
    latents: Any
    rotated: Any
    latent_rows: Any
    rotated_rows: Any
