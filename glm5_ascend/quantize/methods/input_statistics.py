"""Statistics of a linear's input from calibration: per-channel extremes of all tokens and a few whole rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from glm5_ascend.quantize.methods.rounding import ActivationRange

#: Rows of a linear's input kept for the smoothing searches, all calibration sequences together.
SEARCH_ROWS = 512
#: Times the energy of the median row that a row counts for at most, see `levelled`.
LOUDEST = 32.0


@dataclass
class InputStatistics:
    """Statistics of X [tokens, K] gathered over several calls.

    Attributes:
        row_limit: rows to keep. offered: rows of all calls together, so that only rows to keep are stored.
        low, high: fp32 [K], per-channel minimum and maximum over all tokens.
        mean_abs: fp32 [K], per-channel mean of |X| over all tokens.
        rows: fp32 [<= row_limit, K], whole rows spread over all calls, for the searches.
    """

    row_limit: int
    offered: int
    low: torch.Tensor = field(init=False)
    high: torch.Tensor = field(init=False)
    tokens: int = 0
    _sum_abs: torch.Tensor = field(init=False)
    _rows: torch.Tensor = field(init=False)
    _seen: int = 0
    _stored: int = 0

    @classmethod
    def of(cls, x: torch.Tensor, row_limit: int) -> InputStatistics:
        """Statistics of X fp32 [tokens, K]."""
        statistics = cls(row_limit, len(x))
        statistics.add(x)
        return statistics

    def add(self, x: torch.Tensor) -> None:
        if len(x):
            self._include(x.amin(0), x.amax(0), x.abs().sum(0), len(x), x)

    def include(self, piece: InputStatistics) -> None:
        """Add the statistics of other tokens; their kept rows are offered."""
        if piece.tokens:
            self._include(piece.low, piece.high, piece._sum_abs, piece.tokens, piece.rows)

    def _include(
        self, low: torch.Tensor, high: torch.Tensor, total: torch.Tensor, tokens: int, rows: torch.Tensor
    ) -> None:
        if self.tokens:
            low, high = torch.minimum(low, self.low), torch.maximum(high, self.high)
            total = total + self._sum_abs
        else:  # one block for all calls: many small ones between the large ones of a forward would keep those apart
            self._rows = rows.new_empty(min(self.row_limit, self.offered), rows.shape[1])
        self.low, self.high, self._sum_abs = low, high, total
        self.tokens += tokens
        index = spread(torch.arange(self.offered), self.row_limit) - self._seen
        index = index[(index >= 0) & (index < len(rows))].to(rows.device)
        self._rows[self._stored : self._stored + len(index)] = rows[index]
        self._seen, self._stored = self._seen + len(rows), self._stored + len(index)

    @property
    def mean_abs(self) -> torch.Tensor:
        return self._sum_abs / self.tokens

    @property
    def max_abs(self) -> torch.Tensor:
        return torch.maximum(self.low.abs(), self.high.abs())

    @property
    def rows(self) -> torch.Tensor:
        return self._rows[: self._stored]

    def split(self) -> tuple[InputStatistics, torch.Tensor]:
        """Statistics of the first half of the kept rows, and the second half: sequences are kept in order, so the
        halves are different texts. A single row serves as both."""
        rows = self.rows
        half = max(len(rows) // 2, 1)
        return InputStatistics.of(rows[:half], self.row_limit), rows[half:] if len(rows) > 1 else rows

    def range_after(self, scale: torch.Tensor | None) -> ActivationRange:
        """Per-tensor range of X / scale."""
        low, high = (self.low, self.high) if scale is None else (self.low / scale, self.high / scale)
        return ActivationRange(float(low.min()), float(high.max()))


def spread(x: torch.Tensor, limit: int) -> torch.Tensor:
    """At most `limit` rows, evenly spaced, in order: the same rows for the same input, no random choice."""
    if len(x) <= limit:
        return x
    return x[torch.linspace(0, len(x) - 1, limit).round().long().to(x.device)]


def levelled(rows: torch.Tensor) -> torch.Tensor:
    """Rows of X [n, K], those with more than `LOUDEST` times the median energy scaled down to that.

    In SmolLM2 a text's first token has millions of times the energy of others inside an expert, and leaves a residual
    stream so large that all following norms divide by hundreds. In sums of squares nothing else would count.
    """
    energy = rows.square().sum(1, keepdim=True)
    limit = LOUDEST * energy.median()
    if limit == 0 or not (energy > limit).any():
        return rows
    return torch.where(energy > limit, rows * (limit / energy.clamp_min(1e-30)).sqrt(), rows)
