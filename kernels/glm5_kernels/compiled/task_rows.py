"""Which weight rows a task multiplies with few tokens: some of each quarter of a matrix.

A thread reads four distant places of memory at once faster than one, because the processor's prefetcher stops at the
end of a page of 4 KiB. Tiles have one, two or LINES tokens, and a row in memory of each quarter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from numba.extending import register_jitable

from glm5_kernels.compiled.simd import WIDTH, i64_const

#: Rows in memory of a tile, and the most tokens of one; weight rows of a task.
LINES, TASK_ROWS = 4, 4 * WIDTH
#: Bytes that a tile of LINES tokens prefetches its lines ahead, at least: such tokens fill the nearest cache, where the
#: processor's own prefetcher then reads at half of the rate. Tiles of fewer tokens are faster without.
AHEAD = 4096


class TaskRows(NamedTuple):
    """`width` rows from `first` on, and as many from each `distance` rows behind, LINES times in all.

    They are `runs` runs of `columns` neighbouring rows, which also begin `distance` rows apart.
    """

    first: int
    width: int
    distance: int
    runs: int
    columns: int


@register_jitable  # type: ignore[untyped-decorator]
def task_rows(task: int, rows: int) -> TaskRows:
    """The rows of a task of a matrix with so many rows, a multiple of WIDTH; the last task has what is left."""
    quarter = rows // TASK_ROWS * WIDTH
    if task * WIDTH < quarter:
        return TaskRows(task * WIDTH, WIDTH, quarter, LINES, WIDTH)
    left = rows - LINES * quarter
    return TaskRows(LINES * quarter, left // LINES, left // LINES, 1, left)


@register_jitable  # type: ignore[untyped-decorator]
def padded_tokens(tokens: int) -> int:
    """Tokens in whole tiles of LINES."""
    return -(-tokens // LINES) * LINES


class TileSums(NamedTuple):
    """The address of the sums of a tile, and the bytes from those of a token, and of a line, to the next ones."""

    base: int
    token_pitch: int
    line_pitch: int


def address_of(builder: Any, places: Any, *indices: int) -> Any:
    """LLVM code of base + pitch * index of a named tuple of a base and one pitch for each index."""
    address, *pitches = (builder.extract_value(places, field) for field in range(1 + len(indices)))
    for pitch, index in zip(pitches, indices, strict=True):
        address = builder.add(address, builder.mul(pitch, i64_const(index)))
    return address
