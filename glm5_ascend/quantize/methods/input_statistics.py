"""What calibration remembers of a linear's input: per-channel extremes of all tokens and a few whole rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from glm5_ascend.quantize.methods.rounding import ActivationRange


@dataclass
class InputStatistics:
    """Statistics of X [tokens, K] gathered over several calls.

    Attributes:
        low, high: fp32 [K], per-channel minimum and maximum over all tokens.
        mean_abs: fp32 [K], per-channel mean of |X| over all tokens.
        rows: fp32 [<= row_limit, K], whole rows spread over the calls, for the searches.
    """

    row_limit: int
    low: torch.Tensor = field(init=False)
    high: torch.Tensor = field(init=False)
    tokens: int = 0
    _sum_abs: torch.Tensor = field(init=False)
    _rows: list[torch.Tensor] = field(default_factory=list)

    def add(self, x: torch.Tensor) -> None:
        if len(x):
            rows = [spread(x, self.row_limit).clone()]
            self._include(x.amin(0), x.amax(0), x.abs().sum(0), len(x), rows)

    def _include(
        self, low: torch.Tensor, high: torch.Tensor, total: torch.Tensor, tokens: int, rows: list[torch.Tensor]
    ) -> None:
        if self.tokens:
            low, high = torch.minimum(low, self.low), torch.maximum(high, self.high)
            total = total + self._sum_abs
        self.low, self.high, self._sum_abs = low, high, total
        self.tokens += tokens
        self._rows += rows

    @property
    def mean_abs(self) -> torch.Tensor:
        return self._sum_abs / self.tokens

    @property
    def max_abs(self) -> torch.Tensor:
        return torch.maximum(self.low.abs(), self.high.abs())

    @property
    def rows(self) -> torch.Tensor:
        return spread(torch.cat(self._rows), self.row_limit)

    @classmethod
    def merged(cls, row_limit: int, pieces: Iterable[InputStatistics]) -> InputStatistics:
        """The statistics of all pieces together; the same for the same pieces in the same order."""
        whole = cls(row_limit)
        for piece in pieces:
            whole._include(piece.low, piece.high, piece._sum_abs, piece.tokens, piece._rows)
        return whole

    def split(self) -> tuple[InputStatistics, torch.Tensor]:
        """Statistics of the first half of the kept rows, and the second half: sequences are kept in order, so the
        halves are different texts. A single row serves as both."""
        rows = self.rows
        half = max(len(rows) // 2, 1)
        first = InputStatistics(self.row_limit)
        first.add(rows[:half])
        return first, rows[half:] if len(rows) > 1 else rows

    def range_after(self, scale: torch.Tensor | None) -> ActivationRange:
        """Per-tensor range of X / scale."""
        low, high = (self.low, self.high) if scale is None else (self.low / scale, self.high / scale)
        return ActivationRange(float(low.min()), float(high.max()))


def spread(x: torch.Tensor, limit: int) -> torch.Tensor:
    """At most `limit` rows, evenly spaced, in order: the same rows for the same input, no random choice."""
    if len(x) <= limit:
        return x
    return x[torch.linspace(0, len(x) - 1, limit).round().long().to(x.device)]
