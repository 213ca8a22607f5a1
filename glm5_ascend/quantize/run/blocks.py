"""The blocks of rows that a tensor is read, rounded and written in, and the sums of errors over them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from glm5_ascend.quantize.limits import BLOCK_ROWS, BLOCK_WEIGHTS

#: (squared error, squared weight) by scheme.
ErrorSums = dict[str, tuple[float, float]]


@dataclass
class WeightErrors:
    """Sums over linears of (W_deq - W)^2 and W^2, by scheme; W after rotation and smoothing."""

    squared_error: dict[str, float] = field(default_factory=dict)
    squared_weight: dict[str, float] = field(default_factory=dict)

    def add(self, scheme: str, error: float, weight: float) -> None:
        self.squared_error[scheme] = self.squared_error.get(scheme, 0.0) + error
        self.squared_weight[scheme] = self.squared_weight.get(scheme, 0.0) + weight

    def include(self, other: Mapping[str, tuple[float, float]]) -> None:
        for scheme, (error, weight) in other.items():
            self.add(scheme, error, weight)

    def sums(self) -> ErrorSums:
        return {scheme: (self.squared_error[scheme], self.squared_weight[scheme]) for scheme in self.squared_error}

    def relative(self) -> dict[str, float]:
        """rms(W_deq - W) / rms(W) per scheme."""
        return {k: (self.squared_error[k] / max(self.squared_weight[k], 1e-30)) ** 0.5 for k in self.squared_error}


def blocks(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """(start, stop) of the blocks of rows a tensor of `shape` is worked on in."""
    width = shape[1] if len(shape) > 1 else 1
    rows = max(BLOCK_ROWS, BLOCK_WEIGHTS // width // BLOCK_ROWS * BLOCK_ROWS)
    for start in range(0, shape[0], rows):
        yield start, min(start + rows, shape[0])
