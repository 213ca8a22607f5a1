"""Error-compensated rounding (`method: gptq`): how a linear's rows hand on the error of a rounded column.

The second moments of the inputs are known from few tokens: a routed expert of GLM-5 has 6144 columns and sees some
hundred tokens. Trusted as they are they make rounding worse on other texts. They are shrunk towards "all directions
alike" by what Ledoit and Wolf derive from the tokens themselves: the fewer and the more unequal, the stronger.

Source: GPTQ (arXiv 2210.17323); O. Ledoit, M. Wolf, A well-conditioned estimator for large-dimensional covariance
matrices (2004).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from glm5_kernels import ops

#: Inputs a linear is rounded on. Time and memory grow with them; a linear with fewer columns takes all that it saw,
#: because as many combined rows as columns say the same.
FEEDBACK_ROWS = 512
#: Directions in which the inputs of a wider linear keep their own energy: rounding takes the longer the more they are.
#: What the others hold is shared evenly by all columns, as shrinkage does it with a part of all energy.
DIRECTIONS = 64
#: Tokens of a text are not independent, and texts to come differ from it: shrink more than the formula says.
#: On the demo model 2 to 5 are alike and 1 is worse, for 32 tokens as for 2000 (relative output error of other texts).
_CAUTION = 3.0


@dataclass(frozen=True)
class Feedback:
    """What all rows of the linears that read one input share.

    Attributes:
        order: int64 [K], columns by falling energy: what is rounded last cannot be made up for, so that is the least.
        inputs, gains: fp32 [K, n] on the host, in that order; `kernels/glm5_kernels/gptq`.
        steps: turns of coordinate descent after the first pass, each at least as long as that.
    """

    order: torch.Tensor
    inputs: torch.Tensor
    gains: torch.Tensor
    damping: float
    steps: int

    @classmethod
    def on(cls, rows: torch.Tensor, steps: int = 0) -> Feedback | None:
        """For inputs fp32 [n, K]; None if they say nothing about any direction."""
        rows = rows.cpu()  # an NPU has neither float64 nor these factorizations
        rows = rows[rows.square().sum(1) > 0]
        if not len(rows):
            return None
        gram = _gram(rows)
        damping = shrinkage(rows, gram) * float(rows.square().sum()) / rows.shape[1]
        if len(rows) > rows.shape[1]:
            rows = torch.linalg.qr(rows.double(), mode="r").R.float()  # the same second moments in K rows
        elif (most := directions(rows.shape[1])) < len(rows) < rows.shape[1]:
            rows, rest = leading(rows, gram, most)
            damping += rest / rows.shape[1]
        order = rows.square().sum(0).argsort(descending=True, stable=True)
        inputs = rows[:, order].T.contiguous()
        return cls(order, inputs, ops.gptq_inverse_factors(inputs, damping), damping, steps)

    def round(self, weight: torch.Tensor, scale: torch.Tensor, largest: int, refit: bool) -> tuple[torch.Tensor, ...]:
        """(integers times scale fp32 [N, K], scale [N, 1]) for weight fp32 [N, K]; `refit` may change the scale."""
        # A device would launch some kernels per column: with a GPU all of a run took over three times its host's time.
        integers, found = ops.gptq_round(
            weight.cpu(), scale.cpu(), largest, self.order, self.inputs, self.gains, self.damping, self.steps, refit
        )
        return integers.mul_(found).to(weight.device), found.to(weight.device)


class Rounding(Protocol):
    """Chooses the integers of a linear's rows."""

    def round(self, weight: torch.Tensor, scale: torch.Tensor, largest: int, refit: bool) -> tuple[torch.Tensor, ...]:
        """As `Feedback.round`."""
        ...


def _gram(rows: torch.Tensor) -> torch.Tensor:
    """fp32, the smaller one of rows rows^T and rows^T rows, for rows fp32 [n, K]: their sums of squares are equal."""
    return rows @ rows.T if len(rows) < rows.shape[1] else rows.T @ rows


def shrinkage(rows: torch.Tensor, gram: torch.Tensor | None = None) -> float:
    """Weight of "all directions alike" against the second moments of rows fp32 [n, K], as a ratio > 0.

    Ledoit and Wolf's b^2 / (d^2 - b^2): what sampling adds to the moments against what is left of their structure.
    """
    n, columns = rows.shape
    gram = (_gram(rows) if gram is None else gram) / n
    energy = rows.double().square().sum(1)
    return ratio_of_shrinkage(
        n, columns, float(gram.double().square().sum()), float(energy.sum()), float(energy.square().sum())
    )


def ratio_of_shrinkage(n: int, columns: int, squares: float, energy: float, energy_squares: float) -> float:
    """`shrinkage` of n rows [K], from sums.

    Args:
        squares: of all entries of their second moments [K, K].
        energy, energy_squares: sums of every row's |x|^2 and |x|^4.
    """
    mean = energy / n / columns
    structure = squares / columns - mean**2
    noise = (energy_squares / n - squares) / n / columns
    share = min(max(noise, 1e-4 * structure) / max(structure, 1e-30), 0.95)
    return _CAUTION * share / (1 - share)


def leading(rows: torch.Tensor, gram: torch.Tensor, count: int) -> tuple[torch.Tensor, float]:
    """(fp32 [count, K], energy of the rest): the second moments of rows fp32 [n, K] in their strongest directions.

    Args:
        gram: rows rows^T, fp32 [n, n], n > count.
    """
    energies, vectors = torch.linalg.eigh(gram.double())
    return vectors[:, -count:].T.float() @ rows, float(energies[:-count].clamp_min(0).sum())


def directions(columns: int) -> int:
    """The most directions in which a linear with so many columns is rounded."""
    return columns if columns <= FEEDBACK_ROWS else DIRECTIONS


def rows_kept(tokens: int, columns: int) -> int:
    """Rows to keep of an input of `columns` seen on `tokens` tokens."""
    return tokens if columns <= FEEDBACK_ROWS else min(tokens, FEEDBACK_ROWS)
