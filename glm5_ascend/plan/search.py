"""The best layouts of a cluster under a load and limits on latency: what is proven, and what nobody is known to run."""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from glm5_ascend.plan.evidence import SLOPE, Case, cases, distance
from glm5_ascend.plan.hardware import Hardware, fitted
from glm5_ascend.plan.inputs import ACCEPTANCE_SPREAD, Slo, Workload
from glm5_ascend.plan.layout import MAX_SLICES, Layout, parse_layout, sequences_for
from glm5_ascend.plan.memory import ENDS
from glm5_ascend.plan.model import PlannedModel
from glm5_ascend.plan.predict import Prediction, predict
from glm5_ascend.plan.proven import PROVEN, UNPROVEN, Evidence, faults, proven_layouts, with_sequences
from glm5_ascend.plan.steps import Steps

#: Numbers of machines that are tried without --nodes, and of known layouts that are varied.
NODES, VARIED = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64), 24
#: Layouts are equally fast from this ratio on, far below the error of a prediction; share of clients or speed.
EQUAL, NEARLY_ALL = 0.95, 0.9
#: Meets the SLO with all clients, with fewer of them, or with none.
MEETS, SHEDS, MISSES = 0, 1, 2


@dataclass(frozen=True)
class Question:
    """Model, machine, load, limits and options of a plan; `accepted` as in `tokens_per_step`, drafts: None: any."""

    steps: Steps
    workload: Workload
    slo: Slo
    accepted: float | None
    drafts: int | None

    @property
    def model(self) -> PlannedModel:
        return self.steps.model

    @property
    def hardware(self) -> Hardware:
        return self.steps.hardware

    def nearest(self, layout: Layout) -> tuple[float, Case]:
        """Distance to the nearest public result, and this result."""
        plan = self.model, self.hardware.name, layout, self.workload
        return min(((distance(case, *plan), case) for case in cases() if case.whole), key=lambda pair: pair[0])

    def half_widths(self, layout: Layout) -> dict[str, float]:
        """Half widths of the ranges' logarithms: they should hold four of five results that no fit has seen."""
        growth = 1.0 + SLOPE * self.nearest(layout)[0]
        spread = ACCEPTANCE_SPREAD if layout.decode.drafts and self.accepted is None else 0.0
        bands = fitted().bands.items()
        return {name: math.hypot(growth * band, 0.0 if name == "ttft" else spread) for name, band in bands}


@dataclass(frozen=True)
class Candidate:
    """A layout and its figures for a load: the one that was asked for, or fewer clients (admitted) that meet the SLO.

    Attributes:
        verdict: MEETS | SHEDS | MISSES. rank: the same, but serving almost all clients counts as serving all.
        unsure: it fits only if unpublished amounts of memory are small, and no public source runs it.
    """

    layout: Layout
    load: Workload
    prediction: Prediction
    evidence: Evidence
    nodes: int
    verdict: int
    rank: int
    admitted: float | None
    excess: float
    unsure: bool

    @property
    def value(self) -> float:
        """Tokens per second within the SLO; without any, reduced by the excess over it."""
        return self.prediction.tok_s / (self.excess if self.verdict == MISSES else 1.0)

    @property
    def order(self) -> tuple[object, ...]:
        """Sort key, best first; of equal throughput the one with fewer nodes, then with the shorter latency."""
        p = self.prediction
        return self.rank, self.unsure, -float(f"{self.value:.3g}"), self.nodes, p.ttft + 1e3 * p.tpot


def evaluate(question: Question, layout: Layout, evidence: Evidence, shed: bool = True) -> Candidate | None:
    """Figures of a layout; with an SLO that it misses, of as many clients as it serves within it (`shed`)."""
    asked, ends = question.workload, ENDS[1:] if evidence.fits else ENDS[1:2]

    @functools.cache
    def at(clients: float) -> tuple[Workload, Prediction, float] | None:
        """Load, figures, and excess over the limits."""
        requests = None if asked.requests is None else max(1, round(asked.requests * clients / asked.concurrency))
        load = replace(asked, concurrency=clients, requests=requests)
        p = predict(question.steps, layout, load, question.accepted, ends)
        if p is None:
            return None
        late = load.rate is not None and p.bound != "arrivals" and p.tok_s < 0.99 * load.rate * load.output
        excess = question.slo.excess(p.tpot, p.ttft)
        return load, p, max(excess, 1.01) if late and requests is None else excess

    all_clients = at(asked.concurrency)
    if all_clients is None:
        return None
    figures, admitted, verdict = all_clients, None, MEETS if all_clients[2] <= 1.0 else MISSES
    if verdict == MISSES and shed:
        clients = range(1, math.ceil(asked.concurrency), max(1, int(asked.concurrency) // 100))
        served = bisect.bisect_right(clients, 1.0, key=lambda n: (at(n) or all_clients)[2])
        if served:
            verdict, admitted = SHEDS, float(clients[served - 1])
            figures = at(admitted) or all_clients
    load, p, excess = figures
    nearly_all = verdict == SHEDS and load.concurrency >= NEARLY_ALL * asked.concurrency
    unsure = not evidence.fits and p.memory.most_requests(layout.decode, load, "low") <= 0
    nodes, rank = layout.nodes(question.hardware), MEETS if nearly_all else verdict
    return Candidate(layout, load, p, evidence, nodes, verdict, rank, admitted, excess, unsure)


def best_layouts(question: Question, nodes: int | None) -> tuple[int, list[Candidate], Candidate | None]:
    """Number of machines; layouts best first, empty if nothing fits; and one that nobody runs, if it is worth a trial.

    Without `nodes` the fewest machines that carry the load within the SLO, or that fit if no number does.
    """
    fewest, candidates = 0, list[Candidate]()
    for count in NODES if nodes is None else (nodes,):
        candidates = proven_candidates(question, count, shed=nodes is not None)
        candidates = candidates or experimental_candidates(question, count, ())
        if nodes is None:
            candidates.sort(key=lambda c: c.verdict)  # stable: the best that serves all clients, if there is one
        if candidates and (nodes is not None or candidates[0].verdict == MEETS or candidates[0].evidence is UNPROVEN):
            break
        fewest = fewest or (count if candidates else 0)
    else:
        count, candidates = fewest, proven_candidates(question, fewest)
    if not candidates:
        return nodes or NODES[-1], [], None
    if nodes is None:
        count = min(c.nodes for c in candidates if c.verdict == candidates[0].verdict)
        candidates = [c for c in candidates if c.nodes <= count]
    best = candidates[0]
    trials = [] if best.evidence is UNPROVEN else experimental_candidates(question, count, candidates)[:1]
    for trial in trials:  # worth it: its low end is better, or it alone meets the SLO
        low = trial.value * math.exp(-question.half_widths(trial.layout)["tok_s"])
        if trial.rank < best.rank or (trial.rank == best.rank and low > best.value):
            return count, candidates, trial
    return count, candidates, None


def proven_candidates(question: Question, nodes: int, shed: bool = True) -> list[Candidate]:
    """Layouts with a source, and copies of them, best first; `shed` as in `evaluate`."""
    layouts = proven_layouts(question.model, question.hardware, nodes, question.workload, question.drafts)
    surest = sorted(layouts, key=lambda pair: (pair[1].tag == PROVEN, not pair[1].sister, bool(pair[1].profile)))
    candidates = _ranked(question, dict(surest), shed)  # of sources with the same settings the last one counts
    if candidates:  # a few per cent are no reason for a layout with faults or changes
        top = candidates[0]
        equal = [c for c in candidates if (c.rank, c.unsure) == (top.rank, top.unsure) and c.value >= EQUAL * top.value]
        equal = [c for c in equal if c.nodes <= top.nodes]

        def doubts(c: Candidate) -> tuple[object, ...]:
            changed, unnamed = c.evidence.tag != PROVEN, c.evidence.profile is None
            return c.verdict, len(faults(question.model, c.layout)), changed, unnamed, c.order

        first = min(equal, key=doubts)
        candidates.sort(key=lambda c: c is not first)
    return candidates


def experimental_candidates(question: Question, nodes: int, proven: Sequence[Candidate]) -> list[Candidate]:
    """Layouts without a source, best first."""
    names = {str(candidate.layout) for candidate in proven}
    variants = _variants(question, nodes, proven)
    return _ranked(question, {layout: UNPROVEN for layout in variants if str(layout) not in names})


def _ranked(question: Question, layouts: Mapping[Layout, Evidence], shed: bool = True) -> list[Candidate]:
    """Candidates best first; of those of one name the best, or one without changes that is nearly as good."""
    candidates = (evaluate(question, layout, evidence, shed) for layout, evidence in layouts.items())
    best: dict[str, Candidate] = {}
    for candidate in sorted(filter(None, candidates), key=lambda c: (*c.order, c.evidence.profile is None)):
        first = best.setdefault(str(candidate.layout), candidate)
        nearly = (candidate.rank, candidate.unsure, candidate.value >= EQUAL * first.value)
        if first.evidence.tag != PROVEN == candidate.evidence.tag and nearly == (first.rank, first.unsure, True):
            best[str(candidate.layout)] = candidate
    return sorted(best.values(), key=lambda c: c.order)


def _variants(question: Question, nodes: int, proven: Iterable[Candidate]) -> Iterator[Layout]:
    """The proven layouts, or whole nodes, with other divisions, DSA-CP, DCP, and without expert parallelism."""
    config, node, clients = question.model.config, question.hardware.dies_per_node, question.workload.concurrency
    bases = [candidate.layout for candidate in proven][:VARIED]
    if not bases:
        for dies in (d for d in range(1, nodes * node + 1) if config.n_routed_experts % d == 0):
            if dies % node == 0 or (dies < node and node % dies == 0):
                for n in dict.fromkeys((1, nodes * node // dies)):
                    text = f"tp=1,dp={dies},replicas={n},buffer_mb=200"
                    bases.append(parse_layout(text, config, clients, question.drafts))
    for layout in bases:
        dies = layout.decode.tp * layout.decode.dp
        divisors = math.gcd(dies, node, config.num_attention_heads)
        for tp in (t for t in range(1, divisors + 1) if divisors % t == 0):
            sequences = sequences_for(clients / layout.replicas, dies // tp)
            plain = replace(layout.decode, tp=tp, dp=dies // tp, dcp=1, dsa_cp=False, expert_parallel=True)
            plain = with_sequences(question.model, plain, sequences, layout.prefill)
            engines = [plain, replace(plain, expert_parallel=tp != dies or tp > MAX_SLICES)]
            engines += [] if config.attention_types else [replace(plain, dcp=tp)]
            if layout.prefill is None and tp > 1:
                engines.append(replace(plain, dsa_cp=True, flashcomm=True))
            yield from (replace(layout, decode=engine) for engine in engines)
