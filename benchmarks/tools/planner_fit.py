"""The planner's six constants from measured runs, by least squares."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from glm5_ascend.errors import PlanError
from glm5_ascend.plan.evidence import Case
from glm5_ascend.plan.hardware import Constants
from glm5_ascend.plan.memory import ENDS
from glm5_ascend.plan.predict import Prediction, predict
from glm5_ascend.plan.steps import Steps

Vector = NDArray[np.float64]
#: Typical value of each constant, and standard deviation of its logarithm: they decide what the data cannot separate.
#: Shares: of large products and copies elsewhere; seconds: public step times without the bytes and operations.
PRIORS = {
    "memory": (0.6, 0.4), "compute": (0.25, 0.4), "graph_seconds": (2e-4, 0.7), "eager_seconds": (2e-3, 0.7),
    "token_seconds": (3e-6, 1.0), "step_seconds": (5e-3, 0.7),
}  # fmt: skip
#: Expected error of a run's logarithm: the difference between two runs of the same layout.
SIGMA = 0.12
#: Width of a difference quotient, in standardized logarithms: predictions have small jumps (whole pages).
STEP = 0.03
#: Damping at the start, and the largest, at which no step is better.
_DAMPING, _MOST_DAMPING = 1e-3, 1e6


def predictions(cases: Sequence[Case], constants: Constants) -> list[Prediction]:
    """Predict each case; raises PlanError if a run does not fit its machine by the planner's memory."""
    steps = functools.cache(functools.partial(Steps, constants=constants))
    results = []
    for case in cases:
        result = predict(steps(case.model, case.hardware), case.layout, case.workload, ends=ENDS[1:])
        if result is None:
            raise PlanError(f"run {case.row.id} does not fit the machine it ran on", "correct layout or workload")
        results.append(result)
    return results


def errors(cases: Sequence[Case], constants: Constants) -> list[dict[str, float]]:
    """ln(predicted / measured) of each case, by output."""
    pairs = zip(cases, predictions(cases, constants), strict=True)
    return [{name: math.log(getattr(p, name) / x) for name, x in case.measured.items()} for case, p in pairs]


def to_constants(x: Vector) -> Constants:
    """Constants of standardized logarithms."""
    pairs = zip(PRIORS.items(), x, strict=True)
    return Constants(**{name: float(typical * np.exp(spread * z)) for (name, (typical, spread)), z in pairs})


def to_vector(constants: Constants) -> Vector:
    """Standardized logarithms of constants, the inverse of `to_constants`."""
    values = ((max(getattr(constants, name), 1e-12) / typical, spread) for name, (typical, spread) in PRIORS.items())
    return np.array([np.log(ratio) / spread for ratio, spread in values])


def residuals(cases: Sequence[Case], constants: Constants) -> Vector:
    """The weighted errors of all outputs of all cases; their squares are soft L1, so that no run bends a fit."""
    pairs = [(e / SIGMA, c.row.weight / len(row)) for c, row in zip(cases, errors(cases, constants), strict=True)
             for e in row.values()]  # fmt: skip
    error, weight = np.array(pairs).T
    weighted: Vector = np.copysign(np.sqrt(2.0 * weight * (np.sqrt(1.0 + error**2) - 1.0)), error)
    return weighted


def fit(cases: Sequence[Case], start: Constants, trust: float = 1.0, near: Constants | None = None) -> Constants:
    """Constants fitted to runs by least squares; they move from `start` by about `trust` times the priors' spread. The
    search begins at `near`, or at `start`."""
    origin = to_vector(start)
    return to_constants(
        _least_squares(
            lambda x: np.concatenate([residuals(cases, to_constants(x)), (x - origin) / trust]),
            to_vector(near or start),
        )
    )


def _least_squares(function: Callable[[Vector], Vector], x: Vector, tolerance: float = 1e-5) -> Vector:
    """The minimum of |function|^2 near `x` by Levenberg and Marquardt's method."""
    value, damping = function(x), _DAMPING
    while True:
        jacobian = np.stack([(function(x + step) - value) / STEP for step in STEP * np.eye(len(x))], axis=1)
        gradient, curvature = jacobian.T @ value, jacobian.T @ jacobian
        while damping < _MOST_DAMPING:
            better = x - np.linalg.solve(curvature + damping * np.diag(curvature.diagonal()), gradient)
            gain = value @ value - (new := function(better)) @ new
            if gain > 0:
                break
            damping *= 10
        else:
            return x
        x, finished = better, gain < tolerance * (value @ value)
        value, damping = new, damping / 10
        if finished:
            return x
