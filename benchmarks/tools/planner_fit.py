"""Fit the planner's seven efficiencies: scipy's trust region on logarithms, with priors and a robust loss.

The priors are `calibrate.PRIORS`. A row with a large error counts less (soft L1), so that no single run bends the fit;
the priors stay squares. The objective has several minima (for example where a prefill stops to wait for its host), so a
fit begins at several points and keeps the lowest minimum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from scipy.optimize import least_squares

from glm5_ascend.plan.baselines import Baseline
from glm5_ascend.plan.calibrate import PRIORS, SIGMA, STEP, Vector, errors, residuals


def weights(cases: Sequence[Baseline]) -> Vector:
    """Weight of each residual: the row's weight, divided by the number of its outputs."""
    return np.array([c.row.weight / len(c.row.measured()) for c in cases for _ in c.row.measured()])


def starts() -> list[Vector]:
    """Starting points of a fit: the priors' typical values, and each constant a standard deviation up or down."""
    axes = np.eye(len(PRIORS))
    return [np.zeros(len(PRIORS)), *axes, *-axes]


def objective(x: Vector, cases: Sequence[Baseline]) -> float:
    """Value that a fit minimizes: soft L1 of the rows' residuals over SIGMA, plus the squares of `x`."""
    return float(_loss(_residuals_and_priors(x, cases) ** 2, weights(cases))[0].sum())


def fit(cases: Sequence[Baseline], begin: Sequence[Vector] | None = None) -> Vector:
    """Find the best efficiencies for these cases, as standardized logarithms.

    Args:
        begin: starting points, in standardized logarithms; None: all of `starts()`.
    """

    def function(x: Vector) -> Vector:
        return _residuals_and_priors(x, cases)

    def loss(squared: Vector) -> Vector:
        return _loss(squared, row_weights)

    row_weights = weights(cases)
    solutions = [
        least_squares(function, x, jac=lambda x: _slopes(function, x), loss=loss, ftol=1e-6, xtol=1e-5, gtol=1e-5)
        for x in (starts() if begin is None else begin)
    ]
    return np.asarray(min(solutions, key=lambda solution: float(solution.cost)).x, dtype=np.float64)


def _residuals_and_priors(x: Vector, cases: Sequence[Baseline]) -> Vector:
    return np.concatenate([residuals(x, cases) / SIGMA, x])  # each standardized logarithm is about zero


def _loss(squared: Vector, row_weights: Vector) -> Vector:
    """[3, n]: value and two derivatives; weighted soft L1 for the rows, the identity for the priors after them.

    (scipy's own soft L1 would apply to the priors as well.)
    """
    rows = len(row_weights)
    root = np.sqrt(1.0 + squared[:rows])
    value = np.stack([squared, np.ones_like(squared), np.zeros_like(squared)])
    value[:, :rows] = row_weights * np.stack([2.0 * (root - 1.0), 1.0 / root, -0.5 / root**3])
    return value


def leave_one_out(
    cases: Sequence[Baseline], whole: Vector, group_of: Callable[[Baseline], object]
) -> dict[str, dict[str, float]]:
    """Row id -> output -> ln(predicted / measured) by a fit that saw neither the row nor another of its group.

    Args:
        whole: fit of all cases; the other fits use its linear approximation there.
        group_of: rows with the same key are left out together (5.1 and 5.2 on the same layout are nearly one
            measurement: leaving out only one would let its twin answer).
    """
    unseen: dict[str, dict[str, float]] = {}
    values, slopes, row_weights = residuals(whole, cases), _slopes(lambda x: residuals(x, cases), whole), weights(cases)
    groups = [group_of(case) for case in cases for _ in case.row.measured()]
    for group in dict.fromkeys(map(group_of, cases)):
        left_out = [case for case in cases if group_of(case) == group]
        mask = np.array([other != group for other in groups])
        x = _linear_fit(values[mask], slopes[mask], row_weights[mask], whole)
        unseen |= {case.row.id: error for case, error in zip(left_out, errors(x, left_out), strict=True)}
    return unseen


def _linear_fit(values: Vector, slopes: Vector, row_weights: Vector, whole: Vector) -> Vector:
    """Fit residuals that are `values` at `whole` and linear around it."""

    def function(x: Vector) -> Vector:
        return np.concatenate([(values + slopes @ (x - whole)) / SIGMA, x])

    def loss(squared: Vector) -> Vector:
        return _loss(squared, row_weights)

    jac = np.concatenate([slopes / SIGMA, np.eye(len(whole))])
    return np.asarray(least_squares(function, whole, jac=lambda x: jac, loss=loss).x, dtype=np.float64)


def _slopes(function: Callable[[Vector], Vector], x: Vector) -> Vector:
    """Central differences: [residuals, constants]."""
    steps = STEP * np.eye(len(x))
    return np.stack([(function(x + h) - function(x - h)) / (2 * STEP) for h in steps], axis=1)
