"""The six constants of the planner, each with a physical meaning, and their fit to public results as a file."""

from __future__ import annotations

import functools
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from glm5_ascend.files.yaml_file import read_yaml
from glm5_ascend.plan.data_files import Keys, NotNegative, Positive, data_file

Vector = NDArray[np.float64]
Share = Annotated[float, Field(ge=0, le=1)]


class Constants(Keys):
    """Rates that are reached, and overheads.

    Attributes:
        memory: share of the memory's peak rate.
        compute: share of the cube's and the vector units' peak rates.
        graph_seconds: launch and synchronization of a layer of a captured decode step.
        eager_seconds: the same of a layer whose operators the host launches one by one (prefill, drafts).
        token_seconds: time of a token of a decode step per layer (routing, sampling, slot tables).
        step_seconds: time of a step outside of the layers (scheduling, inputs, sampling, answers).
    """

    memory: Positive
    compute: Positive
    graph_seconds: NotNegative
    eager_seconds: NotNegative
    token_seconds: NotNegative
    step_seconds: NotNegative = 0.0


#: (typical value, standard deviation of its logarithm). They keep near plausible values what the data cannot separate.
#: Shares: of large products and copies elsewhere; seconds: public step times without the bytes and operations.
PRIORS = {
    "memory": (0.6, 0.4),
    "compute": (0.25, 0.4),
    "graph_seconds": (2e-4, 0.7),
    "eager_seconds": (2e-3, 0.7),
    "token_seconds": (3e-6, 1.0),
    "step_seconds": (5e-3, 0.7),
}


class FittedFile(Keys):
    """data/fitted.yaml, as benchmarks/report_planner.py writes it.

    Attributes:
        bands: half width of a prediction's logarithm at distance 0, by output (tok_s, ttft, tpot).
        median_error: median error of the rows that a fit did not see, by output.
        inside: share of these rows inside of their bands.
        later: errors of the rows after the date of the split, by a fit on the rows before it.
    """

    date: str
    constants: Constants
    rows: Annotated[int, Field(ge=1)]
    bands: dict[str, Positive]
    median_error: dict[str, NotNegative]
    inside: Share
    later: dict[str, str]


@functools.cache
def fitted() -> FittedFile:
    """The file of the public fit."""
    return read_yaml(data_file("fitted.yaml"), FittedFile)


def to_constants(x: Vector) -> Constants:
    """Constants of standardized logarithms."""
    pairs = zip(PRIORS.items(), x, strict=True)
    return Constants(**{name: float(typical * np.exp(spread * z)) for (name, (typical, spread)), z in pairs})


def to_vector(constants: Constants) -> Vector:
    """Standardized logarithms of constants, the inverse of `to_constants`."""
    values = [(max(getattr(constants, name), 1e-12) / typical, spread) for name, (typical, spread) in PRIORS.items()]
    return np.array([np.log(ratio) / spread for ratio, spread in values])
