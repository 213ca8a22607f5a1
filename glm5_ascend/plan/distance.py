"""How far a question lies from what is public: a band is wider there, and the plan says in what."""

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

#: Sizes that differ by this factor are one unit apart; so are two kinds of anything.
UNIT = 4.0
#: A question is an extrapolation in a size where no public row is within this factor.
NEAR = 2.5
_SIZES = {
    "ratio": "prompt tokens per output token", "context": "tokens of context", "ep": "dies that share the experts",
    "batch": "requests per rank",
}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """What decides how a deployment behaves, in few words. Sizes are logarithms."""

    sizes: dict[str, float]
    kinds: dict[str, str]


def place(model: PlannedModel, hardware: str, layout: Layout, load: Workload) -> Setting:
    """Where a plan or a public row lies."""
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
    return Setting({name: math.log(max(value, 1e-3)) for name, value in sizes.items()}, kinds)


def place_of(case: Baseline) -> Setting:
    return place(case.planned, case.machine.name, case.layout, case.workload)


@functools.cache
def _public() -> tuple[Setting, ...]:
    return tuple(place_of(case) for case in judged())


def distance(one: Setting, other: Setting) -> float:
    """0: the same; a factor of UNIT in a size, or another kind of something: 1; root of squares."""
    sizes = sum(((one.sizes[name] - other.sizes[name]) / math.log(UNIT)) ** 2 for name in one.sizes)
    return math.sqrt(sizes + sum(one.kinds[name] != other.kinds[name] for name in one.kinds))


@dataclass(frozen=True)
class Miss:
    """How far off a fit that had not seen a row was: ln(predicted / measured), by output."""

    group: object
    where: Setting
    errors: Mapping[str, float]


def misses(unseen: Mapping[str, Mapping[str, float]]) -> tuple[Miss, ...]:
    """Of the rows judged; `unseen`: predicted / measured by row and output."""
    return tuple(
        Miss(c.row.group_key(), place_of(c), {name: math.log(ratio) for name, ratio in unseen[c.row.id].items()})
        for c in judged()
        if c.row.id in unseen
    )


def spread(output: str, here: Setting, rows: Sequence[Miss]) -> float:
    """Errors to expect at a place: of the rows near it more than of the others, and more with the distance.

    output: tok_s | ttft | tpot, whose few rows are joined by those of tok_s. Rows of a group share one vote.
    """
    names = ("tpot", "tok_s") if output == "tpot" else (output,)
    told = [(row, abs(row.errors[name])) for row in rows for name in names if name in row.errors]
    groups = Counter(row.group for row, _ in told)
    votes = [(math.exp(-(distance(here, row.where) ** 2)) / groups[row.group], error) for row, error in told]
    overall = sum(error for _, error in told) / len(told)
    local = (overall + sum(vote * error for vote, error in votes)) / (1.0 + sum(vote for vote, _ in votes))
    return local * (1.0 + fitted().slope * min(distance(here, row.where) for row, _ in told))


@functools.cache
def _committed() -> tuple[Miss, ...]:
    return misses(fitted().unseen)


def half_width(output: str, here: Setting) -> float:
    """Half of the band's width on a logarithmic scale: as many spreads as hold four of five rows not seen."""
    return fitted().bands[output] * spread(output, here, _committed())


def beyond(here: Setting) -> list[str]:
    """In what no public row is near: sizes by factor, kinds by name."""
    found = []
    for name, words in _SIZES.items():
        gap = min(abs(here.sizes[name] - other.sizes[name]) for other in _public())
        if gap > math.log(NEAR):
            known = [math.exp(other.sizes[name]) for other in _public()]
            found.append(
                f"{math.exp(here.sizes[name]):,.3g} {words}: public rows have {min(known):,.3g} to {max(known):,.3g}"
            )
    for name, kind in here.kinds.items():
        if all(other.kinds[name] != kind for other in _public()):
            found.append(f"{name} {kind}: no public row")
    whole = [place_of(c).kinds for c in judged() if c.row.layers is None and c.row.out_tok_s is not None]
    if all((kinds["weights"], kinds["prefill"]) != (here.kinds["weights"], here.kinds["prefill"]) for kinds in whole):
        found.append(
            f"{here.kinds['weights']} with prefill {here.kinds['prefill']}: no public throughput of a whole model"
        )
    return found
