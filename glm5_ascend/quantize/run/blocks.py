"""The blocks of rows that a tensor is read, rounded and written in, and the sums of errors over them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

#: Weights of a block of rows; a block is read, rounded and written at once.
BLOCK_WEIGHTS = 2**22
#: A block's rows are a multiple of this: INT4 packs two rows into one.
BLOCK_ROWS = 16
#: Sums of (W_deq - W)^2 and W^2 over linears, by scheme; W after rotation and smoothing.
ErrorSums = dict[str, tuple[float, float]]


def add_errors(total: ErrorSums, other: Mapping[str, tuple[float, float]]) -> None:
    for scheme, (error, weight) in other.items():
        before = total.get(scheme, (0.0, 0.0))
        total[scheme] = before[0] + error, before[1] + weight


def relative_errors(sums: ErrorSums) -> dict[str, float]:
    """rms(W_deq - W) / rms(W) by scheme."""
    return {scheme: (error / max(weight, 1e-30)) ** 0.5 for scheme, (error, weight) in sums.items()}


def blocks(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """(start, stop) of the blocks of rows of a tensor of `shape`."""
    width = shape[1] if len(shape) > 1 else 1
    rows = max(BLOCK_ROWS, BLOCK_WEIGHTS // width // BLOCK_ROWS * BLOCK_ROWS)
    for start in range(0, shape[0], rows):
        yield start, min(start + rows, shape[0])
