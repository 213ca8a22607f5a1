"""The best layouts of a cluster under a workload and limits on latency, and the layout of `--layout`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from glm5_ascend.errors import PlanError
from glm5_ascend.plan import cache, memory
from glm5_ascend.plan.efficiency import Efficiencies, typical_error
from glm5_ascend.plan.hardware import Cluster
from glm5_ascend.plan.layout import Engine, Layout, check_engine
from glm5_ascend.plan.layouts import (
    PROVEN_DRAFTS,
    SearchOptions,
    aggregated,
    decode_engine,
    disaggregated,
    engine,
    prefill_engine,
)
from glm5_ascend.plan.model import PlannedModel
from glm5_ascend.plan.predict import Prediction, predict
from glm5_ascend.plan.timing import Timing
from glm5_ascend.plan.workload import Slo, Workload

#: Draft tokens that are tried without --mtp.
DRAFTS = (0, 1, 3, 5)
#: Layouts of the first round that are tried with other numbers of drafts.
FINALISTS = 8


@dataclass(frozen=True)
class Candidate:
    """A layout and its steady state."""

    layout: Layout
    prediction: Prediction

    def meets(self, slo: Slo) -> bool:
        return slo.met(self.prediction.tpot, self.prediction.ttft)


def search(
    model: PlannedModel,
    cluster: Cluster,
    workload: Workload,
    slo: Slo,
    efficiency: Efficiencies,
    options: SearchOptions,
) -> list[Candidate]:
    """All layouts that fit, best first: those within the limits by throughput, then the others by their excess."""
    timing = Timing(model, cluster.hardware, efficiency)

    def evaluate(layout: Layout) -> Candidate | None:
        prediction = predict(model, cluster.hardware, layout, efficiency, workload, options.acceptance, timing)
        return Candidate(layout, prediction) if prediction else None

    layouts = dict.fromkeys(aggregated(model, cluster, workload, options))
    layouts |= dict.fromkeys(disaggregated(model, cluster, workload, options, timing))
    candidates = [candidate for layout in layouts if (candidate := evaluate(layout))]
    candidates = sorted(_without_doubtful(candidates, slo), key=lambda candidate: rank(candidate, slo))
    if options.drafts is None:
        finalists = [_best_drafts(candidate, slo, evaluate) for candidate in candidates[:FINALISTS]]
        candidates = sorted([*finalists, *candidates[FINALISTS:]], key=lambda candidate: rank(candidate, slo))
    return candidates


def _without_doubtful(candidates: list[Candidate], slo: Slo) -> list[Candidate]:
    """Drop layouts that no public result has and that gain less by it than the error of a prediction."""
    by_layout = {candidate.layout: candidate for candidate in candidates}

    def is_better(candidate: Candidate) -> bool:
        decode = candidate.layout.decode
        if decode.dcp == 1 and decode.expert_parallel:
            return True
        for split in (True, False):
            usual = replace(decode, dcp=1, expert_parallel=True, split_prefill=split)
            other = by_layout.get(replace(candidate.layout, decode=usual))
            if other is None:
                continue
            gain = candidate.prediction.output_per_second / other.prediction.output_per_second
            if gain <= typical_error() and candidate.meets(slo) <= other.meets(slo):
                return False
        return True

    return [candidate for candidate in candidates if is_better(candidate)]


def _best_drafts(candidate: Candidate, slo: Slo, evaluate: Callable[[Layout], Candidate | None]) -> Candidate:
    """The layout with the best number of drafts. All public results draft 3: another must gain more than the error."""
    best = candidate
    for drafts in DRAFTS:
        decode = replace(candidate.layout.decode, drafts=drafts)
        if candidate.layout.prefill is not None:
            decode = decode_engine(decode)
        other = evaluate(replace(candidate.layout, decode=decode)) if drafts != PROVEN_DRAFTS else None
        if other is None:
            continue
        gain = other.prediction.output_per_second > typical_error() * candidate.prediction.output_per_second
        meets_slo_only_then = not candidate.meets(slo) and slo.met(
            other.prediction.tpot * typical_error(), other.prediction.ttft
        )
        if rank(other, slo) < rank(best, slo) and (gain or meets_slo_only_then):
            best = other
    return best


def rank(candidate: Candidate, slo: Slo) -> tuple[float, bool, float, float]:
    """Sort key, best first: within the limits, sure to fit, by throughput, and of equal throughput by latency."""
    p = candidate.prediction
    excess = max(p.tpot / slo.tpot if slo.tpot else 0.0, p.ttft / slo.ttft if slo.ttft else 0.0)
    may_not_fit = p.memory.budget_low < 0.0  # by the high ends of what nobody published
    return (
        0.0 if candidate.meets(slo) else excess,
        may_not_fit,
        -float(f"{p.output_per_second:.6g}"),
        p.residence + p.ttft,
    )


_LAYOUT_KEYS = (
    "tp", "dp", "dcp", "pp", "ep", "redundant", "dsa_cp", "seqs", "replicas", "prefill_tp", "prefill_dp", "prefill_pp",
    "prefills",
)  # fmt: skip
#: Keys that may be 0: switches, and a number of copies.
_MAY_BE_ZERO = ("ep", "redundant", "dsa_cp")


def read_layout(text: str) -> dict[str, int]:
    """Read the keys of --layout and their numbers.

    Raises:
        PlanError: unknown key, not a number, or a missing key.
    """
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


def parse_layout(
    text: str, model: PlannedModel, cluster: Cluster, workload: Workload, options: SearchOptions
) -> Layout:
    """`tp=16,dp=2` or `tp=1,dp=32,prefill_tp=8,prefill_dp=4`; `ep=0`: every expert is cut over all dies.

    Raises:
        PlanError: a wrong key or number, or a layout that is impossible on this cluster.
    """
    values = read_layout(text)
    replicas = values.get("replicas", 1)
    options = replace(options, sequences=values.get("seqs"))
    decode = engine(model, values["tp"], values.get("dp", 1), workload, replicas, options, values.get("dcp", 1))
    decode = _with_switches(replace(decode, pp=values.get("pp", 1)), values)
    prefill = None
    if "prefill_tp" in values:
        prefill = prefill_engine(values["prefill_tp"], values["prefill_dp"], options, values.get("prefill_pp", 1))
        prefill = replace(_with_switches(prefill, values), expert_parallel=True)
        check_engine(prefill, model.config, cluster.hardware)
        decode = decode_engine(decode)
    check_engine(decode, model.config, cluster.hardware)
    if prefill is None and decode.split_prefill and "dsa_cp" not in values:
        free = memory.fit(model, cluster.hardware, decode)
        if free.tokens() < cache.pages(workload.prompt + workload.output):  # whole projections leave too little
            decode = replace(decode, split_prefill=False)
    layout = Layout(decode, prefill, replicas, values.get("prefills", 0) if prefill else 0)
    if layout.dies != cluster.dies:
        raise PlanError(
            f"--layout {text}: takes {layout.dies} dies, {cluster.nodes} x {cluster.hardware.name} has {cluster.dies}",
            "tp x dp x pp (of prefill and decode together, times their engines) must be the number of dies",
        )
    return layout


def _with_switches(engine: Engine, values: dict[str, int]) -> Engine:
    dsa_cp = bool(values["dsa_cp"]) if "dsa_cp" in values else engine.split_prefill
    expert_parallel = bool(values.get("ep", 1))
    dsa_cp = dsa_cp and expert_parallel and engine.tp > 1  # FlashComm, which DSA-CP needs, needs both
    return replace(engine, split_prefill=dsa_cp, redundant=values.get("redundant", 0), expert_parallel=expert_parallel)
