"""How much of a peak is reached: the seven fitted constants, and nothing else that is fitted."""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass
from typing import cast

from glm5_ascend.files.yaml_file import read_yaml
from glm5_ascend.plan.data_files import EfficiencyKeys, FittedFile, data_file
from glm5_ascend.plan.hardware import Hardware


@dataclass(frozen=True)
class Efficiencies:
    """Seven constants, fitted on public throughput by benchmarks/report_planner.py.

    Attributes:
        stream: share of the memory rate for data read in long runs.
        gather: share of it for rows read here and there.
        compute: share of a unit's peak rate.
        graph_seconds: what a layer of a captured decode step takes besides its work (launch, synchronisation).
        eager_seconds: the same for a layer launched by the host one operator at a time (prefill, drafts).
        token_seconds: what a token of a decode step takes per layer besides all that (sampling, routing, slot tables).
        prefill: a prefill's device time is longer than by the shares above by one over this.
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


#: Every fraction reached, no overhead: the bound no machine beats.
PERFECT = Efficiencies(1.0, 1.0, 1.0, 0.0, 0.0, 0.0)


@functools.cache
def fitted() -> FittedFile:
    """The data file the fit wrote: constants, the band of its errors, what it was fitted on."""
    return read_yaml(data_file("fitted.yaml"), FittedFile)


def fitted_efficiencies() -> Efficiencies:
    return Efficiencies(**fitted().efficiencies)


def efficiencies_of(hardware: Hardware) -> Efficiencies:
    """The machine's own, or those fitted on public numbers."""
    return fitted_efficiencies() if hardware.efficiencies is None else Efficiencies(**hardware.efficiencies)
