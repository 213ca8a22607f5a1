"""The best layouts of a cluster under a load and limits on latency: what is proven, and what nobody is known to run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from glm5_ascend.plan import memory
from glm5_ascend.plan.layout import MAX_SLICES, Engine, Layout, sequences_for, usual_settings
from glm5_ascend.plan.predict import Prediction, predict
from glm5_ascend.plan.proven import NOBODY, PROVEN, Evidence, faults, proven_layouts, with_sequences
from glm5_ascend.plan.steps import Steps
from glm5_ascend.plan.workload import Acceptance, Slo, Workload

#: Known layouts that are varied.
VARIED = 24
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
    """Model, machine, load, limits and options of a plan, without the number of nodes."""

    steps: Steps
    workload: Workload
    slo: Slo
    acceptance: Acceptance
    drafts: int | None = None


@dataclass(frozen=True)
class Candidate:
    """A layout and its figures.

    Attributes:
        load: what the prediction is for: the load that was asked for, or less of it that meets the SLO.
        admitted: clients of a smaller load; None: all.
        verdict: MEETS | SHEDS | MISSES.
        unsure: it fits only if unpublished amounts of memory are small, and no public source runs it.
    """

    layout: Layout
    load: Workload
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

    def smaller(clients: float) -> Workload:
        requests = None if load.requests is None else max(1, round(load.requests * clients / load.concurrency))
        return replace(load, concurrency=clients, requests=requests)

    def at(clients: float) -> Prediction | None:
        full = predict(steps, layout, smaller(clients), question.acceptance)
        return full or (
            predict(steps, layout, smaller(clients), question.acceptance, "high") if evidence.fits else None
        )

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
            prediction, verdict, load = at(admitted) or prediction, SHEDS, smaller(admitted)
    unsure = not evidence.fits and memory.most_requests(prediction.memory, layout.decode, load, "low") <= 0
    count, most = len(faults(steps.model, layout)), load.concurrency >= NEARLY_ALL * question.workload.concurrency
    return Candidate(
        layout, load, prediction, evidence, nodes, verdict, admitted, excess(prediction), unsure, count, most
    )


def proven_candidates(question: Question, nodes: int, shed: bool = True) -> list[Candidate]:
    """Layouts with a source, and copies of them, best first; `shed` as in `evaluate`."""
    steps = question.steps
    layouts = proven_layouts(steps.model, steps.hardware, nodes, question.workload, question.drafts)
    candidates = _ranked(question, dict(layouts), shed)
    if candidates:  # a few per cent are no reason for a layout with faults or changes
        top = candidates[0]
        equal = [c for c in candidates if (c.rank, c.unsure) == (top.rank, top.unsure) and c.value >= EQUAL * top.value]
        equal = [c for c in equal if c.nodes <= top.nodes]
        late = LATE * min(c.prediction.ttft for c in equal)
        first = min(equal, key=lambda c: (c.verdict, c.prediction.ttft > late, c.doubts, c.order))
        candidates = [first, *(c for c in candidates if c is not first)]
    return candidates


def experimental_candidates(question: Question, nodes: int, proven: Sequence[Candidate]) -> list[Candidate]:
    """Layouts without a source, best first."""
    names = {str(candidate.layout) for candidate in proven}
    return _ranked(
        question, {layout: NOBODY for layout in _variants(question, nodes, proven) if str(layout) not in names}
    )


def _ranked(question: Question, layouts: Mapping[Layout, Evidence], shed: bool = True) -> list[Candidate]:
    """Candidates best first; only the best ones are asked for the load that they serve within the SLO.

    Layouts that differ in sizes only have one name, and the best one counts.
    """
    candidates = [evaluate(question, layout, evidence, shed=False) for layout, evidence in layouts.items()]
    ranked = sorted((c for c in candidates if c), key=lambda c: c.order)
    if shed and ranked and ranked[-1].verdict == MISSES:
        least = ranked[0].value if ranked[0].verdict == MEETS else 0.0
        late = [c for c in ranked if c.verdict == MISSES and c.prediction.output_per_second > least][:FINALISTS]
        finalists = {id(c): evaluate(question, c.layout, c.evidence) or c for c in late}
        ranked = sorted((finalists.get(id(c), c) for c in ranked), key=lambda c: c.order)
    best: dict[str, Candidate] = {}
    for candidate in ranked:
        best.setdefault(str(candidate.layout), candidate)
    return list(best.values())


def _variants(question: Question, nodes: int, proven: Iterable[Candidate]) -> Iterator[Layout]:
    """The proven layouts, or whole nodes, with other divisions, DSA-CP, DCP, and without expert parallelism."""
    model, hardware = question.steps.model, question.steps.hardware
    config, node, clients = model.config, hardware.dies_per_node, question.workload.concurrency
    bases = [candidate.layout for candidate in proven][:VARIED]
    if not bases:
        usual = usual_settings(config, question.drafts)
        for dies in (d for d in range(1, nodes * node + 1) if config.n_routed_experts % d == 0):
            if dies % node == 0 or (dies < node and node % dies == 0):
                count = nodes * node // dies
                bases += [Layout(Engine(1, dies, **usual), None, n) for n in dict.fromkeys((1, count))]
    for layout in bases:
        dies = layout.decode.tp * layout.decode.dp
        for tp in (t for t in range(1, min(dies, node) + 1) if dies % t == 0 and node % t == 0):
            if config.num_attention_heads % tp == 0:
                sequences = sequences_for(clients / layout.replicas, dies // tp)
                plain = replace(layout.decode, tp=tp, dp=dies // tp, dcp=1, dsa_cp=False, expert_parallel=True)
                plain = with_sequences(model, plain, sequences, layout.prefill)
                engines = [plain, replace(plain, expert_parallel=tp != dies or tp > MAX_SLICES)]
                engines += [] if config.attention_types else [replace(plain, dcp=tp)]
                if layout.prefill is None and tp > 1:
                    engines.append(replace(plain, dsa_cp=True, flashcomm=True))
                yield from (replace(layout, decode=engine) for engine in engines)
