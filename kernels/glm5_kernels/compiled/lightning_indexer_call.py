"""What the compiled Lightning Indexer is called with."""

from __future__ import annotations

from typing import Any, NamedTuple

from glm5_kernels.compiled.rows import RowAddress


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
