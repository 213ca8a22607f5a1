"""The best layouts of a cluster under a workload and limits on latency, and a layout that the user names."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from glm5_ascend.errors import PlanError
from glm5_ascend.plan import cache, memory
from glm5_ascend.plan.efficiency import Efficiencies, fitted
from glm5_ascend.plan.hardware import Cluster
from glm5_ascend.plan.layout import Engine, Layout, check_engine
from glm5_ascend.plan.layouts import PROVEN_DRAFTS, Options, apart, decode_engine, engine, prefill_engine, together
from glm5_ascend.plan.model import PlannedModel
from glm5_ascend.plan.predict import Prediction, predict
from glm5_ascend.plan.timing import Timing
from glm5_ascend.plan.workload import Slo, Workload

#: Draft tokens that are tried when none are named.
DRAFTS = (0, 1, 3, 5)
#: Layouts of the first round that are tried with other numbers of drafts.
FINALISTS = 8


@dataclass(frozen=True)
class Candidate:
    """A layout and its steady state."""

    layout: Layout
    prediction: Prediction


def layouts(
    model: PlannedModel, cluster: Cluster, workload: Workload, options: Options, timing: Timing
) -> Iterator[Layout]:
    """Everything the engine would accept on this cluster, with three drafts unless they are fixed."""
    yield from together(model, cluster, workload, options)
    yield from apart(model, cluster, workload, options, timing)


def search(
    model: PlannedModel, cluster: Cluster, workload: Workload, slo: Slo, efficiency: Efficiencies, options: Options
) -> list[Candidate]:
    """All layouts that fit, best first: those within the limits by throughput, then the others by how far off."""
    timing = Timing(model, cluster.hardware, efficiency)

    def judged(layout: Layout) -> Candidate | None:
        found = predict(model, cluster.hardware, layout, efficiency, workload, options.acceptance, timing)
        return Candidate(layout, found) if found else None

    every = dict.fromkeys(layouts(model, cluster, workload, options, timing))
    found = _sure([c for layout in every if (c := judged(layout))], slo)
    found.sort(key=lambda c: rank(c, slo))
    if options.drafts is None:
        best = [_drafted(c, slo, judged) for c in found[:FINALISTS]]
        found = sorted([*best, *found[FINALISTS:]], key=lambda c: rank(c, slo))
    return found


def _sure(found: list[Candidate], slo: Slo) -> list[Candidate]:
    """Without those that do what no public result does and gain less by it than the band of an error."""
    known = {c.layout: c for c in found}
    sure = math.exp(fitted().bands["tok_s"] * fitted().median_error["tok_s"])

    def gains(candidate: Candidate) -> bool:
        own = candidate.layout.decode
        if own.dcp == 1 and own.expert_parallel:
            return True
        for split in (True, False):
            usual = replace(own, dcp=1, expert_parallel=True, split_prefill=split)
            other = known.get(replace(candidate.layout, decode=usual))
            if other is None:
                continue
            met = [slo.met(c.prediction.tpot, c.prediction.ttft) for c in (candidate, other)]
            near = candidate.prediction.output_per_second <= sure * other.prediction.output_per_second
            if near and met[0] <= met[1]:
                return False
        return True

    return [c for c in found if gains(c)]


def _drafted(candidate: Candidate, slo: Slo, judged: Callable[[Layout], Candidate | None]) -> Candidate:
    """With the best number of drafts: all public results draft 3, so another must gain more than the band."""
    best, sure = candidate, math.exp(fitted().bands["tok_s"] * fitted().median_error["tok_s"])
    for drafts in DRAFTS:
        decode = replace(candidate.layout.decode, drafts=drafts)
        if candidate.layout.prefill is not None:
            decode = decode_engine(decode)
        other = judged(replace(candidate.layout, decode=decode)) if drafts != PROVEN_DRAFTS else None
        if other is None:
            continue
        better = rank(other, slo) < rank(best, slo)
        gain = other.prediction.output_per_second > sure * candidate.prediction.output_per_second
        saves = not slo.met(candidate.prediction.tpot, candidate.prediction.ttft) and slo.met(
            other.prediction.tpot * sure, other.prediction.ttft
        )
        if better and (gain or saves):
            best = other
    return best


def rank(candidate: Candidate, slo: Slo) -> tuple[float, bool, float, float]:
    """Sorts best first: within the limits, sure to fit, by throughput, and of the same throughput by latency."""
    p = candidate.prediction
    over = max(p.tpot / slo.tpot if slo.tpot else 0.0, p.ttft / slo.ttft if slo.ttft else 0.0)
    unsure = p.memory.budget_low < 0.0  # weights alone may not fit, by the high ends of what nobody published
    return (
        0.0 if slo.met(p.tpot, p.ttft) else over,
        unsure,
        -float(f"{p.output_per_second:.6g}"),
        p.residence + p.ttft,
    )


_LAYOUT_KEYS = (
    "tp", "dp", "dcp", "pp", "ep", "redundant", "dsa_cp", "replicas", "prefill_tp", "prefill_dp", "prefill_pp",
    "prefills",
)  # fmt: skip
#: Keys that may be 0: switches, and a number of copies.
_MAY_BE_ZERO = ("ep", "redundant", "dsa_cp")


def read_layout(text: str) -> dict[str, int]:
    """The keys of --layout and their numbers."""
    values: dict[str, int] = {}
    for item in text.split(","):
        key, _, value = (part.strip() for part in item.partition("="))
        if key not in _LAYOUT_KEYS:
            raise PlanError(f"--layout: unknown key {key!r}", f"known: {', '.join(_LAYOUT_KEYS)}")
        least = 0 if key in _MAY_BE_ZERO else 1
        if not value.isdecimal() or len(value) > 6 or int(value) < least:
            raise PlanError(f"--layout: {key}={value!r:.20} is not a whole number above {least - 1}", "as in tp=16")
        values[key] = int(value)
    if "tp" not in values:
        raise PlanError("--layout: tp= is missing", "--layout tp=16,dp=1")
    if ("prefill_tp" in values) != ("prefill_dp" in values):
        raise PlanError("--layout: prefill_tp and prefill_dp belong together", "give both or none")
    return values


def parse_layout(text: str, model: PlannedModel, cluster: Cluster, workload: Workload, options: Options) -> Layout:
    """`tp=16,dp=2` or `tp=1,dp=32,prefill_tp=8,prefill_dp=4`; `ep=0`: every expert is cut over all dies.

    Raises:
        PlanError: a wrong key or number, or a layout that is impossible on this cluster.
    """
    values = read_layout(text)
    replicas = values.get("replicas", 1)
    decode = engine(model, values["tp"], values.get("dp", 1), workload, replicas, options, values.get("dcp", 1))
    decode = _switched(replace(decode, pp=values.get("pp", 1)), values)
    first = None
    if "prefill_tp" in values:
        first = prefill_engine(model, values["prefill_tp"], values["prefill_dp"], options, values.get("prefill_pp", 1))
        first = replace(_switched(first, values), expert_parallel=True)
        check_engine(first, model.config, cluster.hardware)
        decode = decode_engine(decode)
    check_engine(decode, model.config, cluster.hardware)
    if first is None and decode.split_prefill and "dsa_cp" not in values:
        held = memory.fit(model, cluster.hardware, decode)
        if held.tokens() < cache.pages(workload.prompt + workload.output):  # whole projections leave too little
            decode = replace(decode, split_prefill=False)
    layout = Layout(decode, first, replicas, values.get("prefills", 0) if first else 0)
    if layout.dies != cluster.dies:
        raise PlanError(
            f"--layout {text}: takes {layout.dies} dies, {cluster.nodes} x {cluster.hardware.name} has {cluster.dies}",
            "tp x dp x pp (of prefill and decode together, times their engines) must be the number of dies",
        )
    return layout


def _switched(one: Engine, values: dict[str, int]) -> Engine:
    cp = bool(values["dsa_cp"]) if "dsa_cp" in values else one.split_prefill
    redundant, whole = values.get("redundant", 0), bool(values.get("ep", 1))
    cp = cp and whole and one.tp > 1  # FlashComm, which DSA-CP needs, needs both
    return replace(one, split_prefill=cp, redundant=redundant, expert_parallel=whole)
