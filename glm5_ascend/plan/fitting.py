"""Least squares for the six efficiencies: damped Gauss-Newton on logarithms, with priors and a robust loss.

Priors keep what the data cannot tell apart near a plausible value instead of at an absurd one; they are stated here
and nothing else is. A row far off counts less (soft L1), so that no single run bends the fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

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
}
#: Expected error of a row's logarithm: what two runs of the same layout differ by.
SIGMA = 0.12
Vector = NDArray[np.float64]


def to_efficiencies(x: Vector) -> Efficiencies:
    """From standardized logarithms; shares stay at or below one."""
    values = {}
    for (name, (typical, spread)), z in zip(PRIORS.items(), x, strict=True):
        value = float(typical * np.exp(spread * z))
        values[name] = value if name.endswith("seconds") else min(1.0, value)
    return Efficiencies(**values)


def residuals(x: Vector, cases: Sequence[Baseline]) -> Vector:
    """ln(predicted / measured) of every case."""
    efficiency = to_efficiencies(x)
    return np.array([np.log(case.output_per_second(efficiency) / case.row.out_tok_s) for case in cases])


def fit(cases: Sequence[Baseline], start: Vector | None = None, steps: int = 12) -> Vector:
    """Standardized logarithms of the best efficiencies for these cases."""

    def weighted(x: Vector) -> Vector:
        raw = residuals(x, cases) / SIGMA
        robust = np.sign(raw) * np.sqrt(2.0 * (np.sqrt(1.0 + raw * raw) - 1.0))
        return np.concatenate([robust, x])  # the prior: each standardized logarithm is about zero

    return _least_squares(weighted, np.zeros(len(PRIORS)) if start is None else start.copy(), steps)


def _least_squares(function: Callable[[Vector], Vector], x: Vector, steps: int) -> Vector:
    value, damping = function(x), 1e-2
    for _ in range(steps):
        jacobian = np.stack([(function(x + h) - value) / 1e-3 for h in 1e-3 * np.eye(len(x))], axis=1)
        gradient, hessian = jacobian.T @ value, jacobian.T @ jacobian
        before = float(value @ value)
        for _ in range(6):
            trial = x - np.linalg.solve(hessian + damping * np.diag(np.diag(hessian)), gradient)
            new = function(trial)
            if float(new @ new) < before:
                x, value, damping = trial, new, damping / 4
                break
            damping *= 5
        else:
            return x
        if before - float(value @ value) < 1e-4 * before:
            return x
    return x


def leave_one_out(cases: Sequence[Baseline], whole: Vector, together: Callable[[Baseline], object]) -> dict[str, float]:
    """Row id -> ln(predicted / measured) by a fit that has not seen the row, nor any other of its group.

    Args:
        together: rows with the same key are left out at the same time (5.1 and 5.2 on the same layout are nearly one
            measurement: leaving out only one would let its twin answer).
    """
    found: dict[str, float] = {}
    for key in dict.fromkeys(together(case) for case in cases):
        out = [case for case in cases if together(case) == key]
        x = fit([case for case in cases if together(case) != key], whole, steps=5)
        found |= {case.row.id: float(r) for case, r in zip(out, residuals(x, out), strict=True)}
    return found
