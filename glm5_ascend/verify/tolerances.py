"""Limits of rms(W_deq - W_ref) / rms(W_ref) for a tensor, a row and a column: above them a weight is not its source.

Measured on correct outputs (whole): int8 0.007, int4 0.11, bf16 0.002; a wrong nibble order, rotation, or another
expert's weight gives 1.2 to 1.4. The fixed limits lie between. A row with one huge weight is rounded coarsely:
its limit is half a step per element, the step being max|row| / largest. Rows catch a wrong scale, columns a smoothing
scale that was moved on one side only.

Error feedback moves an INT4 weight by more than half a step, to make up for others: 0.51 of a column and 0.41 of a
row, measured. Such an error has no direction, that of a wrong scale has: it is a multiple of the line. Where inputs
are small it is as large as that of other columns, however small the weights are: 3.3 times a column in a model with
outliers, but 0.51 of the mean column, and 0.28 along the column (`w4a8-best`, 384 expert linears); 0.73 of the mean
column in SmolLM2. So columns of INT4 are judged by the mean column at the least, and an error without direction is
wrong when it is as large as that: noise hides the column. In INT8, whose steps are small beside most weights, it shows
in columns of a row with a huge weight alone: up to 1.2 half steps per element (`w8a8-best`, 6 tiny models).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from glm5_ascend.checkpoint.schemes import FLOAT, MAX_HALF_STEPS, W4A8_DYNAMIC, W8A8, W8A8_DYNAMIC

LIMITS = {FLOAT: 0.02, W8A8_DYNAMIC: 0.05, W8A8: 0.05, W4A8_DYNAMIC: 0.35}
#: A column can be short (4 rows in a tiny weights_proj), and msModelSlim rounds to bf16 between the steps. SSZ may clip
#: an outlier column of INT4 weights by any factor: elements at the end of the range do not count.
COLUMN_LIMITS = {FLOAT: 0.1, W8A8_DYNAMIC: 0.15, W8A8: 0.15, W4A8_DYNAMIC: 1.0}
#: Of a column's error, the part that is a multiple of the column.
SCALE_LIMITS = COLUMN_LIMITS | {W4A8_DYNAMIC: 0.4}
#: A column smaller than this share of the mean column (in squares) is judged as if it were as large.
COLUMN_FLOORS = {FLOAT: 1e-2, W8A8_DYNAMIC: 1e-2, W8A8: 1e-2, W4A8_DYNAMIC: 1.0}
#: Of a row's error, the part without direction: 0.58 of a row in SmolLM2. For a multiple of the row `LIMITS` hold.
ROW_LIMITS = LIMITS | {W4A8_DYNAMIC: 1.0}
_LARGEST = {W8A8_DYNAMIC: 127, W8A8: 127, W4A8_DYNAMIC: 7}
_SLACK = 1.2  # recovered smoothing scales carry the rounding error of the weight they come from
_TINY = 1e-30
#: Elements whose sums are added in fp32.
_BLOCK = 1 << 17


@dataclass(frozen=True)
class Verdict:
    """Relative error of the whole tensor and of its worst row and column, each with its limit."""

    whole: float
    whole_limit: float
    row: int
    row_error: float
    row_limit: float
    column: int
    column_error: float
    column_limit: float

    @property
    def ok(self) -> bool:  # NaN is not ok
        return (
            self.whole <= self.whole_limit
            and self.row_error <= self.row_limit
            and self.column_error <= self.column_limit
        )

    def __str__(self) -> str:
        return (
            f"relative error {self.whole:.3f} (limit {self.whole_limit:.3f}), row {self.row} {self.row_error:.3f} "
            f"({self.row_limit:.3f}), column {self.column} {self.column_error:.3f} ({self.column_limit:.3f})"
        )


class WeightComparison:
    """Sums of squares of one tensor, collected over pieces of its rows."""

    def __init__(self) -> None:
        self._rows: list[torch.Tensor] = []  # [4, n]: error, weight, error along the weight, largest magnitude
        self._columns: torch.Tensor | float = 0.0  # fp64 [3, K]: error, weight, error along the weight

    def add(self, weight_rows: torch.Tensor, reference: torch.Tensor, bound: torch.Tensor | None = None) -> None:
        """Add rows fp32 [n, K]: dequantized weights and references.

        Args:
            bound: fp32 [n], magnitudes from which a weight of a row is clipped, and may be too small.
        """
        n, columns = weight_rows.shape
        bounds = torch.full((n,), torch.inf) if bound is None else bound
        step = max(_BLOCK // columns, 1)
        for first in range(0, n, step):
            block = slice(first, first + step)
            rows, sums = _squares(weight_rows[block], reference[block], bounds[block, None])
            self._rows.append(rows)
            self._columns = self._columns + sums.double()

    def judge(self, scheme: str) -> Verdict:
        """Return the errors of all added rows, with the limits of `scheme`."""
        error, weight, along, peak = torch.cat(self._rows, 1)
        column_error, column_weight, column_along = torch.as_tensor(self._columns).float()
        # Squares of what correct rounding may cost per element of each row.
        step = torch.zeros_like(peak) if scheme == FLOAT else (_SLACK * peak / (2 * _LARGEST[scheme])).square()
        columns = len(column_error)
        total = weight.sum().clamp_min(_TINY)
        scaled = along.square() / weight.clamp_min(_TINY)
        row, row_error, row_limit = _worse(
            _worst(scaled, weight, columns * step, LIMITS[scheme], floor=1e-4),
            _worst(error, weight, columns * step, ROW_LIMITS[scheme], floor=1e-4),
        )
        allowed, floor = step.sum().expand(columns), COLUMN_FLOORS[scheme]
        scaled = column_along.square() / column_weight.clamp_min(_TINY)
        column, column_error, column_limit = _worse(
            _worst(scaled, column_weight, allowed, SCALE_LIMITS[scheme], floor),
            _worst(column_error, column_weight, allowed * MAX_HALF_STEPS**2, COLUMN_LIMITS[scheme], floor),
        )
        whole_limit = max(LIMITS[scheme], float((columns * step.sum() / total).sqrt()))
        whole = float((error.sum() / total).sqrt())
        return Verdict(whole, whole_limit, row, row_error, row_limit, column, column_error, column_limit)


def _squares(weight: torch.Tensor, reference: torch.Tensor, bounds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums over the rows [4, n] and, of elements that are not clipped, over the columns [3, K] of fp32 [n, K]."""
    difference, size = weight - reference, reference.abs()
    products = [difference.square(), reference.square(), difference * reference]
    rows = torch.stack([*(product.sum(1) for product in products), size.amax(1)])
    clipped = (bounds <= weight.abs()) & (weight.abs() < size)
    if clipped.any():
        products = [product.masked_fill(clipped, 0.0) for product in products]
    return rows, torch.stack([product.sum(0) for product in products])


_Line = tuple[int, float, float]  # index, relative error, limit


def _worse(first: _Line, other: _Line) -> _Line:
    return max(first, other, key=lambda line: line[1] / line[2])


def _worst(error: torch.Tensor, weight: torch.Tensor, allowed: torch.Tensor, limit: float, floor: float) -> _Line:
    # A line far below the others (a dead channel) is judged by the others' size: `floor` of their mean square.
    base = weight.clamp_min(float(weight.mean().clamp_min(_TINY)) * floor)
    relative, limits = (error / base).sqrt(), (allowed / base).sqrt().clamp_min(limit)
    worst = int((relative / limits).nan_to_num(torch.inf).argmax())
    return worst, float(relative[worst]), float(limits[worst])
