"""Shares of the peak rates that are reached: the seven fitted constants."""

from __future__ import annotations

import functools
import math
from dataclasses import asdict, dataclass
from typing import cast

from glm5_ascend.files.yaml_file import read_yaml
from glm5_ascend.plan.data_files import EfficiencyKeys, FittedFile, data_file
from glm5_ascend.plan.hardware import Hardware


@dataclass(frozen=True)
class Efficiencies:
    """Seven constants, fitted on public throughput by benchmarks/report_planner.py.

    Attributes:
        stream: share of the memory rate for sequential reads.
        gather: share of the memory rate for single rows.
        compute: share of a unit's peak rate.
        graph_seconds: overhead of a layer of a captured decode step (launch, synchronization).
        eager_seconds: overhead of a layer whose operators the host launches one by one (prefill, drafts).
        token_seconds: overhead of a token of a decode step per layer (sampling, routing, slot tables).
        prefill: the device time of a prefill by the shares above is divided by this.
    """

    stream: float
    gather: float
    compute: float
    graph_seconds: float
    eager_seconds: float
    token_seconds: float
    prefill: float = 1.0

    def to_json(self) -> EfficiencyKeys:
        return cast(EfficiencyKeys, asdict(self))


#: Full rates and no overhead: a lower bound of all times.
PERFECT = Efficiencies(1.0, 1.0, 1.0, 0.0, 0.0, 0.0)


@functools.cache
def fitted() -> FittedFile:
    """The data file that the fit wrote: constants, bands of their errors, and the rows of the fit."""
    return read_yaml(data_file("fitted.yaml"), FittedFile)


@functools.cache
def typical_error() -> float:
    """Factor by which the throughput of a layout may be wrong: a smaller gain is no reason for an unproven layout."""
    return math.exp(fitted().bands["tok_s"] * fitted().median_error["tok_s"])


def fitted_efficiencies() -> Efficiencies:
    return Efficiencies(**fitted().efficiencies)


def efficiencies_of(hardware: Hardware) -> Efficiencies:
    """Efficiencies of a measured machine, or those fitted on public results."""
    return fitted_efficiencies() if hardware.efficiencies is None else Efficiencies(**hardware.efficiencies)
