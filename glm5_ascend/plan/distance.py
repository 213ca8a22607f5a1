"""Distance of a plan from the public results: bands grow with it, and the plan names the extrapolated sizes."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from glm5_ascend.plan.baselines import Baseline, judged
from glm5_ascend.plan.efficiency import fitted
from glm5_ascend.plan.layout import Layout
from glm5_ascend.plan.model import PlannedModel
from glm5_ascend.plan.workload import Workload

#: Sizes that differ by this factor have distance 1, as have different categories.
UNIT = 4.0
#: A plan extrapolates in a size if no public row is within this factor.
NEAR = 2.5
_SIZES = {
    "ratio": "prompt tokens per output token", "context": "tokens of context", "ep": "dies that share the experts",
    "batch": "requests per rank",
}  # fmt: skip


@dataclass(frozen=True)
class Coordinates:
    """Coordinates of a deployment: logarithms of sizes, and categories."""

    sizes: dict[str, float]
    kinds: dict[str, str]


def coordinates(model: PlannedModel, hardware: str, layout: Layout, load: Workload) -> Coordinates:
    """Coordinates of a plan."""
    engine, batch = layout.decode, load.concurrency / layout.replicas / layout.decode.dp
    sizes = {
        "ratio": load.fresh / load.output, "context": float(load.prompt + load.output),
        "ep": float(engine.tp * engine.dp), "batch": max(0.25, batch),
    }  # fmt: skip
    kinds = {
        "weights": model.expert_type, "machine": hardware, "prefill": "apart" if layout.prefill else "together",
        "drafts": str(engine.drafts), "DCP": "on" if engine.dcp > 1 else "off",
        "pipeline": "on" if engine.pp > 1 or (layout.prefill and layout.prefill.pp > 1) else "off",
        "expert parallelism": "on" if engine.expert_parallel else "off",
    }  # fmt: skip
    return Coordinates({name: math.log(max(value, 1e-3)) for name, value in sizes.items()}, kinds)


def case_coordinates(case: Baseline) -> Coordinates:
    """Coordinates of a public row."""
    return coordinates(case.planned, case.machine.name, case.layout, case.workload)


@functools.cache
def _public() -> tuple[Coordinates, ...]:
    return tuple(case_coordinates(case) for case in judged())


def distance(a: Coordinates, b: Coordinates) -> float:
    """Euclidean distance: a factor of UNIT in a size, or another category, counts 1."""
    sizes = sum(((a.sizes[name] - b.sizes[name]) / math.log(UNIT)) ** 2 for name in a.sizes)
    return math.sqrt(sizes + sum(a.kinds[name] != b.kinds[name] for name in a.kinds))


@dataclass(frozen=True)
class RowError:
    """Errors of a row by a fit that did not see it: ln(predicted / measured), by output."""

    group: object
    coordinates: Coordinates
    errors: Mapping[str, float]


def row_errors(unseen: Mapping[str, Mapping[str, float]]) -> tuple[RowError, ...]:
    """Errors of the judged rows; `unseen`: predicted / measured by row and output."""
    return tuple(
        RowError(
            c.row.group_key(), case_coordinates(c), {name: math.log(ratio) for name, ratio in unseen[c.row.id].items()}
        )
        for c in judged()
        if c.row.id in unseen
    )


def expected_error(output: str, here: Coordinates, rows: Sequence[RowError]) -> float:
    """Expected error of an output: a mean weighted towards near rows, which grows with the distance.

    Rows of a group share one vote.

    Args:
        output: tok_s | ttft | tpot; tpot has few rows and uses those of tok_s, too.
    """
    names = ("tpot", "tok_s") if output == "tpot" else (output,)
    errors = [(row, abs(row.errors[name])) for row in rows for name in names if name in row.errors]
    groups = Counter(row.group for row, _ in errors)
    votes = [(math.exp(-(distance(here, row.coordinates) ** 2)) / groups[row.group], error) for row, error in errors]
    overall = sum(error for _, error in errors) / len(errors)
    local = (overall + sum(vote * error for vote, error in votes)) / (1.0 + sum(vote for vote, _ in votes))
    return local * (1.0 + fitted().slope * min(distance(here, row.coordinates) for row, _ in errors))


@functools.cache
def _fitted_errors() -> tuple[RowError, ...]:
    return row_errors(fitted().unseen)


def half_width(output: str, here: Coordinates) -> float:
    """Half of the band's width on a logarithmic scale: it holds four of five unseen rows."""
    return fitted().bands[output] * expected_error(output, here, _fitted_errors())


def extrapolations(here: Coordinates) -> list[str]:
    """Sizes and categories in which no public row is near."""
    reasons = []
    for name, words in _SIZES.items():
        gap = min(abs(here.sizes[name] - other.sizes[name]) for other in _public())
        if gap > math.log(NEAR):
            public = [math.exp(other.sizes[name]) for other in _public()]
            reasons.append(
                f"{math.exp(here.sizes[name]):,.3g} {words}: public rows have {min(public):,.3g} to {max(public):,.3g}"
            )
    for name, kind in here.kinds.items():
        if all(other.kinds[name] != kind for other in _public()):
            reasons.append(f"{name} {kind}: no public row")
    whole = [case_coordinates(c).kinds for c in judged() if c.row.layers is None and c.row.out_tok_s is not None]
    if all((kinds["weights"], kinds["prefill"]) != (here.kinds["weights"], here.kinds["prefill"]) for kinds in whole):
        reasons.append(
            f"{here.kinds['weights']} with prefill {here.kinds['prefill']}: no public throughput of a whole model"
        )
    return reasons
