"""Least squares for the seven efficiencies: scipy's trust region on logarithms, with priors and a robust loss.

Priors keep what the data cannot tell apart near a plausible value instead of at an absurd one; they are stated here
and nothing else is. A row far off counts less (soft L1), so that no single run bends the fit; the priors stay squares.

The objective has more than one minimum (where a prefill stops waiting for its host, say), so a fit begins at several
places and keeps the lowest: which one it began at must not show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from glm5_ascend.plan.baselines import Baseline
from glm5_ascend.plan.efficiency import Efficiencies

#: (typical value, standard deviation of its logarithm). Shares: of large int8 products and copies elsewhere; seconds:
#: what separates public step times from the roofline.
PRIORS = {
    "stream": (0.6, 0.4),
    "gather": (0.3, 0.7),
    "compute": (0.4, 0.4),
    "graph_seconds": (2e-4, 0.7),
    "eager_seconds": (2e-3, 0.7),
    "token_seconds": (3e-6, 1.0),
    "prefill": (0.5, 0.4),
}
#: Expected error of a row's logarithm: what two runs of the same layout differ by.
SIGMA = 0.12
#: Half of a difference quotient's width, in standardized logarithms: predictions are sure to 1e-4 (a bisection's end)
#: and have small jumps (whole pages, whole batches), which a step as small as scipy's own would fall into.
STEP = 0.03
Vector = NDArray[np.float64]


def to_efficiencies(x: Vector) -> Efficiencies:
    """From standardized logarithms; shares stay at or below one."""
    values = {}
    for (name, (typical, spread)), z in zip(PRIORS.items(), x, strict=True):
        value = float(typical * np.exp(spread * z))
        values[name] = value if name.endswith("seconds") else min(1.0, value)
    return Efficiencies(**values)


def from_efficiencies(efficiencies: Efficiencies) -> Vector:
    """Their standardized logarithms: what `to_efficiencies` takes."""
    return np.array(
        [np.log(getattr(efficiencies, name) / typical) / spread for name, (typical, spread) in PRIORS.items()]
    )


def errors(x: Vector, cases: Sequence[Baseline]) -> list[dict[str, float]]:
    """ln(predicted / measured) of each case, by output."""
    efficiency = to_efficiencies(x)
    found = []
    for case in cases:
        said, measured = case.said(efficiency), case.row.measured()
        found.append({name: math.log(said[name] / measured[name]) for name in measured})
    return found


def residuals(x: Vector, cases: Sequence[Baseline]) -> Vector:
    """The same as one row of numbers, all outputs of a case behind each other."""
    return np.array([value for found in errors(x, cases) for value in found.values()])


def weights(cases: Sequence[Baseline]) -> Vector:
    """Of each residual: its row's, divided by how many outputs the row has."""
    return np.array([c.row.weight / len(c.row.measured()) for c in cases for _ in c.row.measured()])


def starts() -> list[Vector]:
    """Where a fit begins: at the priors' typical values, and with each constant a standard deviation up or down."""
    axes = np.eye(len(PRIORS))
    return [np.zeros(len(PRIORS)), *axes, *-axes]


def objective(x: Vector, cases: Sequence[Baseline]) -> float:
    """What a fit makes least: soft L1 of the rows' residuals over SIGMA, plus the squares of `x`."""
    return float(_loss(_residuals_and_priors(x, cases) ** 2, len(weights(cases)), weights(cases))[0].sum())


def fit(cases: Sequence[Baseline], begin: Sequence[Vector] | None = None) -> Vector:
    """Standardized logarithms of the best efficiencies for these cases.

    Args:
        begin: where to begin, in standardized logarithms; None: at all of `starts()`.
    """

    def function(x: Vector) -> Vector:
        return _residuals_and_priors(x, cases)

    def loss(squared: Vector) -> Vector:
        return _loss(squared, len(shares), shares)

    shares = weights(cases)

    found = [
        least_squares(function, x, jac=lambda x: _slopes(function, x), loss=loss, ftol=1e-6, xtol=1e-5, gtol=1e-5)
        for x in (starts() if begin is None else begin)
    ]
    return np.asarray(min(found, key=lambda one: float(one.cost)).x, dtype=np.float64)


def _residuals_and_priors(x: Vector, cases: Sequence[Baseline]) -> Vector:
    return np.concatenate([residuals(x, cases) / SIGMA, x])  # each standardized logarithm is about zero


def _loss(squared: Vector, rows: int, shares: Vector) -> Vector:
    """[3, n]: value and two derivatives; weighted soft L1 for the first `rows`, the identity for the priors behind.

    (scipy's own name for soft L1 would take the priors in as well.)
    """
    root = np.sqrt(1.0 + squared[:rows])
    value = np.stack([squared, np.ones_like(squared), np.zeros_like(squared)])
    value[:, :rows] = shares * np.stack([2.0 * (root - 1.0), 1.0 / root, -0.5 / root**3])
    return value


def leave_one_out(
    cases: Sequence[Baseline], whole: Vector, together: Callable[[Baseline], object]
) -> dict[str, dict[str, float]]:
    """Row id -> output -> ln(predicted / measured) by a fit that has not seen the row, nor any other of its group.

    Args:
        whole: the fit of all cases; the others are fits of its straight-line approximation there.
        together: rows with the same key are left out at the same time (5.1 and 5.2 on the same layout are nearly one
            measurement: leaving out only one would let its twin answer).
    """
    found: dict[str, dict[str, float]] = {}
    here, slopes, shares = residuals(whole, cases), _slopes(lambda x: residuals(x, cases), whole), weights(cases)
    owner = [together(case) for case in cases for _ in case.row.measured()]
    for key in dict.fromkeys(map(together, cases)):
        out = [case for case in cases if together(case) == key]
        kept = np.array([other != key for other in owner])
        x = _linear_fit(here[kept], slopes[kept], shares[kept], whole)
        found |= {case.row.id: e for case, e in zip(out, errors(x, out), strict=True)}
    return found


def _linear_fit(here: Vector, slopes: Vector, shares: Vector, whole: Vector) -> Vector:
    """The fit of residuals that are `here` at `whole` and straight lines around it."""

    def function(x: Vector) -> Vector:
        return np.concatenate([(here + slopes @ (x - whole)) / SIGMA, x])

    def loss(squared: Vector) -> Vector:
        return _loss(squared, len(shares), shares)

    jac = np.concatenate([slopes / SIGMA, np.eye(len(whole))])
    found = least_squares(function, whole, jac=lambda x: jac, loss=loss)
    return np.asarray(found.x, dtype=np.float64)


def _slopes(function: Callable[[Vector], Vector], x: Vector) -> Vector:
    """Central differences: [residuals, constants]."""
    steps = STEP * np.eye(len(x))
    return np.stack([(function(x + h) - function(x - h)) / (2 * STEP) for h in steps], axis=1)
