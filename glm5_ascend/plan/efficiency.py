"""How much of a peak is reached: the six fitted constants, and nothing else that is fitted."""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass
from typing import Any

import yaml

from glm5_ascend.errors import PlanError
from glm5_ascend.plan.hardware import Hardware
from glm5_ascend.resources import data_dir


@dataclass(frozen=True)
class Efficiencies:
    """Six constants, fitted on public throughput by benchmarks/report_planner.py.

    Attributes:
        stream: share of the memory rate for data read in long runs.
        gather: share of it for rows read here and there.
        compute: share of a unit's peak rate.
        graph_seconds: what a layer of a captured decode step takes besides its work (launch, synchronisation).
        eager_seconds: the same for a layer launched by the host one operator at a time (prefill, drafts).
        token_seconds: what a token of a decode step takes per layer besides all that (sampling, routing, slot tables).
    """

    stream: float
    gather: float
    compute: float
    graph_seconds: float
    eager_seconds: float
    token_seconds: float

    def to_json(self) -> dict[str, float]:
        return asdict(self)


#: Every fraction reached, no overhead: the bound no machine beats.
PERFECT = Efficiencies(1.0, 1.0, 1.0, 0.0, 0.0, 0.0)


@functools.cache
def fitted() -> dict[str, Any]:
    """The data file the fit wrote: constants, the band of its errors, what it was fitted on."""
    value: dict[str, Any] = yaml.safe_load((data_dir("plan/data") / "fitted.yaml").read_text(encoding="utf-8"))
    return value


def fitted_efficiencies() -> Efficiencies:
    return Efficiencies(**fitted()["efficiencies"])


def efficiencies_of(hardware: Hardware) -> Efficiencies:
    """The machine's own, or those fitted on public numbers.

    Raises:
        PlanError: the hardware file names others than the six.
    """
    if hardware.efficiencies is None:
        return fitted_efficiencies()
    try:
        return Efficiencies(**hardware.efficiencies)
    except TypeError:
        wanted = ", ".join(Efficiencies.__dataclass_fields__)
        raise PlanError(
            f"hardware {hardware.name}: efficiencies must be exactly {wanted}", "correct the file"
        ) from None
