"""The best layouts of a cluster under a load and limits on latency: what is proven, and what nobody is known to run.

An engine's dies divide the experts evenly. The numbers of engines come from one list that does not depend on the
cluster, so that a larger cluster can run every layout of a smaller one; nodes may stay idle.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from glm5_ascend.plan import memory
from glm5_ascend.plan.hardware import Cluster
from glm5_ascend.plan.layout import Engine, Layout, exchange_buffer_mb, prefill_settings, sequences_for
from glm5_ascend.plan.predict import Prediction, predict
from glm5_ascend.plan.proven import (
    EXPERIMENTAL,
    NOBODY,
    PROVEN,
    Evidence,
    faults,
    proven_layouts,
)
from glm5_ascend.plan.steps import Steps
from glm5_ascend.plan.workload import Acceptance, Slo, Workload

#: Share of its time that a prefill rank may be busy, where the number of prefill engines is chosen.
PREFILL_UTILIZATION = 0.7
#: Layouts that miss the SLO for which the load within it is searched.
FINALISTS = 16
#: Layouts are equally fast from this ratio on: it is far below the error of a prediction.
EQUAL = 0.95
#: Of equally fast layouts, one with so many times the TTFT of another comes later.
LATE = 3.0
#: Share of the clients.
NEARLY_ALL = 0.9
#: Meets the SLO with all clients, with fewer of them, or with none.
MEETS, SHEDS, MISSES = 0, 1, 2


@dataclass(frozen=True)
class Question:
    """What is asked, without the number of nodes."""

    steps: Steps
    workload: Workload
    slo: Slo
    acceptance: Acceptance
    drafts: int | None = None


@dataclass(frozen=True)
class Candidate:
    """A layout and its figures.

    Attributes:
        admitted: clients with which it meets the SLO; None: all. The prediction is for these clients.
        verdict: MEETS | SHEDS | MISSES.
        unsure: it fits only if unpublished amounts of memory are small, and no public source runs it.
    """

    layout: Layout
    prediction: Prediction
    evidence: Evidence
    nodes: int
    verdict: int
    admitted: float | None
    excess: float
    unsure: bool
    faults: int
    nearly_all: bool

    @property
    def value(self) -> float:
        """Tokens per second within the SLO; without any, reduced by the excess over it."""
        return self.prediction.output_per_second / (self.excess if self.verdict == MISSES else 1.0)

    @property
    def rank(self) -> int:
        """The verdict; serving almost all clients within the SLO ranks with serving all of them."""
        return MEETS if self.verdict == SHEDS and self.nearly_all else self.verdict

    @property
    def order(self) -> tuple[object, ...]:
        """Sort key, best first; of equal throughput the one with fewer nodes, then with the shorter latency."""
        p = self.prediction
        return self.rank, self.unsure, -float(f"{self.value:.3g}"), self.nodes, p.ttft + 1e3 * p.tpot

    @property
    def doubts(self) -> tuple[int, bool, bool]:
        """Sort key of layouts that are almost as fast: known faults, changes of the source, no profile."""
        evidence = self.evidence
        return self.faults, evidence.tag != PROVEN, evidence.profile is None


def evaluate(question: Question, layout: Layout, evidence: Evidence, shed: bool = True) -> Candidate | None:
    """Figures of a layout; with an SLO that it misses, of as many clients as it serves within it (`shed`)."""
    steps, slo, load = question.steps, question.slo, question.workload

    def at(clients: float) -> Prediction | None:
        requests = None if load.requests is None else max(1, round(load.requests * clients / load.concurrency))
        smaller = replace(load, concurrency=clients, requests=requests)
        full = predict(steps, layout, smaller, question.acceptance)
        return full or (predict(steps, layout, smaller, question.acceptance, "high") if evidence.fits else None)

    def excess(p: Prediction) -> float:
        late = load.rate is not None and p.bound != "arrivals" and p.output_per_second < 0.99 * load.rate * load.output
        return max(slo.excess(p.tpot, p.ttft), 1.01 if late and load.requests is None else 0.0)

    prediction, admitted, nodes = at(load.concurrency), None, layout.nodes(steps.hardware)
    if prediction is None:
        return None
    verdict = MEETS if excess(prediction) <= 1.0 else MISSES
    if verdict == MISSES and shed:
        low, high, fewer = 0.0, load.concurrency, at(min(1.0, load.concurrency))
        if fewer and excess(fewer) <= 1.0:
            low = min(1.0, load.concurrency)
            while high - low > max(1.0, 0.01 * high):
                middle = (low + high) / 2
                tried = at(middle)
                low, high = (middle, high) if tried and excess(tried) <= 1.0 else (low, middle)
            admitted = float(math.floor(low))
            prediction, verdict = at(admitted) or prediction, SHEDS
    need = memory.most_requests(prediction.memory, layout.decode, load, prediction.memory.budget_low)
    unsure = not evidence.fits and need <= 0
    known, most = len(faults(steps.model, layout)), (admitted or 0.0) >= NEARLY_ALL * load.concurrency
    return Candidate(layout, prediction, evidence, nodes, verdict, admitted, excess(prediction), unsure, known, most)


def proven_candidates(question: Question, nodes: int, shed: bool = True) -> list[Candidate]:
    """Layouts with a source, and copies of them, best first; `shed` as in `evaluate`."""
    steps = question.steps
    layouts = proven_layouts(steps.model, Cluster(steps.hardware, nodes), question.workload, question.drafts)
    candidates = _ranked(question, dict(layouts), shed)
    if candidates:  # a few per cent are no reason for a layout with faults or changes
        top = candidates[0]
        equal = [c for c in candidates if (c.rank, c.unsure) == (top.rank, top.unsure) and c.value >= EQUAL * top.value]
        equal = [c for c in equal if c.nodes <= top.nodes]
        late = LATE * min(c.prediction.ttft for c in equal)
        first = min(equal, key=lambda c: (c.verdict, c.prediction.ttft > late, c.doubts, c.order))
        candidates = [first, *(c for c in candidates if c is not first)]
    return candidates


def experimental_candidates(question: Question, nodes: int, known: Iterable[Candidate]) -> list[Candidate]:
    """Layouts without a source, best first."""
    names, cluster = {str(c.layout) for c in known}, Cluster(question.steps.hardware, nodes)
    layouts = dict.fromkeys([*_together(question, cluster), *_apart(question, cluster)], NOBODY)
    return _ranked(question, {layout: NOBODY for layout in layouts if str(layout) not in names})


def _ranked(question: Question, layouts: Mapping[Layout, Evidence], shed: bool = True) -> list[Candidate]:
    """Candidates best first; only the best ones are asked for the load that they serve within the SLO.

    Layouts that differ in sizes only have one name, and the best one counts.
    """
    found = [evaluate(question, layout, evidence, shed=False) for layout, evidence in layouts.items()]
    ranked = sorted((c for c in found if c), key=lambda c: c.order)
    if shed and ranked and ranked[-1].verdict == MISSES:
        least = ranked[0].value if ranked[0].verdict == MEETS else 0.0
        late = [c for c in ranked if c.verdict == MISSES and c.prediction.output_per_second > least][:FINALISTS]
        finalists = {id(c): evaluate(question, c.layout, c.evidence) or c for c in late}
        ranked = sorted((finalists.get(id(c), c) for c in ranked), key=lambda c: c.order)
    best: dict[str, Candidate] = {}
    for candidate in ranked:
        best.setdefault(str(candidate.layout), candidate)
    return list(best.values())


def _engine(question: Question, tp: int, dp: int, replicas: int, dcp: int = 1) -> Engine:
    """An engine with as many sequences as its share of the load needs."""
    mtp = question.steps.model.config.num_nextn_predict_layers
    drafts = (3 if mtp else 0) if question.drafts is None else question.drafts
    sequences = sequences_for(question.workload.concurrency / replicas, dp)
    engine = Engine(tp, dp, dcp, drafts=drafts, sequences=sequences)
    return replace(engine, buffer_mb=max(200, exchange_buffer_mb(question.steps.model.config, engine)))


def _engine_sizes(question: Question, cluster: Cluster) -> list[int]:
    """Dies of an engine: parts of a node where there are fewer experts than its dies, else whole nodes."""
    experts, node = question.steps.model.config.n_routed_experts, cluster.hardware.dies_per_node
    sizes = [dies for dies in range(1, min(experts, cluster.dies) + 1) if experts % dies == 0]
    return [dies for dies in sizes if dies % node == 0 or (node > experts and node % dies == 0)]


def _tensor_sizes(question: Question, cluster: Cluster, dies: int) -> list[int]:
    """TP sizes of an engine of so many dies: within a node, and dividing the heads."""
    heads, node = question.steps.model.config.num_attention_heads, cluster.hardware.dies_per_node
    return [tp for tp in range(1, min(dies, node) + 1) if dies % tp == 0 and heads % tp == 0 and node % tp == 0]


def _together(question: Question, cluster: Cluster) -> Iterator[Layout]:
    """Replicas of engines that prefill and decode: with DSA-CP, with DCP, and with every expert cut over all dies."""
    for dies in _engine_sizes(question, cluster):
        for replicas in {cluster.dies // dies, max(1, cluster.dies // dies // 2)}:
            for tp in _tensor_sizes(question, cluster, dies):
                engine = _engine(question, tp, dies // tp, replicas)
                yield Layout(engine, None, replicas)
                if tp > 1:
                    yield Layout(replace(engine, dsa_cp=True, flashcomm=True), None, replicas)
                    yield Layout(_engine(question, tp, dies // tp, replicas, tp), None, replicas)
                if 1 < dies == tp <= 16:
                    yield Layout(replace(engine, expert_parallel=False), None, replicas)


def _apart(question: Question, cluster: Cluster) -> Iterator[Layout]:
    """Engines that prefill and engines that decode, with as many prefill engines as the decode engines need."""
    node, load, steps = cluster.hardware.dies_per_node, question.workload, question.steps
    experts = steps.model.config.n_routed_experts
    for dies in (n * node for n in (1, 2) if n < cluster.nodes and experts % (n * node) == 0):
        for tp in {size for size in (8, 16) if node % size == 0}:
            drafts = 0 if question.drafts == 0 else 1
            prefill = replace(Engine(tp, dies // tp), flashcomm=True, **prefill_settings(tp, drafts))
            prompt = steps.prompt(prefill, load.fresh, load.prompt - load.fresh, float(prefill.dp))
            for size in (d for d in _engine_sizes(question, cluster) if d % node == 0 and d + dies <= cluster.dies):
                for replicas in {max(1, (cluster.dies - dies) // size * part // 4) for part in (1, 2, 3)}:
                    for decode_tp in _tensor_sizes(question, cluster, size):
                        decode = _engine(question, decode_tp, size // decode_tp, replicas)
                        decode = replace(decode, batched_tokens=decode.sequences * (decode.drafts + 1))
                        most = predict(steps, Layout(decode, prefill, replicas, 4096), load, question.acceptance)
                        if most is not None:
                            rate = most.output_per_second / load.output
                            needed = math.ceil(rate * prompt.packed / prefill.dp / PREFILL_UTILIZATION)
                            limit = (cluster.dies - replicas * size) // dies
                            yield Layout(decode, prefill, replicas, min(max(1, needed), limit))


def beats(experimental: Candidate, best: Candidate, factor: float) -> bool:
    """Check if a layout without a source is worth a trial: its low end is better, or it alone meets the SLO.

    Args:
        factor: of the low end of its throughput.
    """
    if experimental.verdict != best.verdict:
        return experimental.verdict < best.verdict
    return experimental.value * factor > best.value and experimental.evidence.tag == EXPERIMENTAL
