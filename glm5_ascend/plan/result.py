"""A plan: the chosen layout, its memory and speed with ranges, and where each number comes from."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from glm5_ascend.errors import PlanError
from glm5_ascend.plan import cache, memory, weights
from glm5_ascend.plan.distance import beyond, half_width, place
from glm5_ascend.plan.efficiency import efficiencies_of
from glm5_ascend.plan.hardware import Cluster
from glm5_ascend.plan.layout import Layout
from glm5_ascend.plan.layouts import Options, together
from glm5_ascend.plan.model import PlannedModel
from glm5_ascend.plan.predict import predict, run_output, run_ttft
from glm5_ascend.plan.search import Candidate, parse_layout, search
from glm5_ascend.plan.spending import UNKNOWN, NodeRates, spending
from glm5_ascend.plan.unequal import told, unequal
from glm5_ascend.plan.workload import Acceptance, Slo, Workload, acceptance_spread

#: Prompt tokens from which the indexer is a large part of a prefill.
LONG_PROMPT = 16_384


@dataclass(frozen=True)
class Range:
    """A number, the range it is believed in, and its basis: measured | derived | fitted | guessed."""

    value: float
    low: float
    high: float
    basis: str

    def to_json(self) -> dict[str, Any]:
        def clean(x: float) -> float | int:
            return int(x) if float(x).is_integer() and abs(x) > 1000 else float(f"{x:.5g}")

        return {"value": clean(self.value), "low": clean(self.low), "high": clean(self.high), "basis": self.basis}


@dataclass(frozen=True)
class Plan:
    """The answer; `others` are the next best layouts, best first."""

    model: PlannedModel
    cluster: Cluster
    workload: Workload
    slo: Slo
    chosen: Candidate
    others: list[Candidate]
    numbers: dict[str, Range]
    extrapolated: list[str]
    within_slo: bool
    notes: list[str] = field(default_factory=list)
    acceptance: float | Acceptance | None = None
    rates: NodeRates = UNKNOWN


@dataclass(frozen=True)
class PlanCommands:
    """What runs a plan: the profile with its layout, if there is one, and lines for a shell."""

    profile: str | None = None
    lines: tuple[str, ...] = ()


def make_plan(
    model: PlannedModel, cluster: Cluster, workload: Workload, slo: Slo, options: Options, layout: str | None = None,
    rates: NodeRates = UNKNOWN,
) -> Plan:  # fmt: skip
    """Search, or judge the given layout.

    Raises:
        PlanError: the context is longer than the model's, or nothing fits; says how many bytes are missing.
    """
    context = workload.prompt + workload.output
    if context > model.config.max_position_embeddings:
        raise PlanError(
            f"--workload: {workload.prompt} + {workload.output} tokens, {model.name} has "
            f"{model.config.max_position_embeddings} positions",
            "shorten in= or out=",
        )
    efficiency = efficiencies_of(cluster.hardware)
    fixed = None
    if layout is not None:
        fixed = parse_layout(layout, model, cluster, workload, options)
        found = predict(model, cluster.hardware, fixed, efficiency, workload, options.acceptance)
        candidates = [Candidate(fixed, found)] if found else []
    else:
        candidates = search(model, cluster, workload, slo, efficiency, options)
    if not candidates:
        tried = [fixed] if fixed else list(together(model, cluster, workload, options))
        raise PlanError(*_nothing_fits(model, cluster, workload, tried, fixed is not None))
    best = candidates[0]
    reasons = extrapolations(model, cluster, workload, best)
    numbers = _numbers(model, cluster, workload, best, rates, options.acceptance)
    met = slo.met(best.prediction.tpot, best.prediction.ttft)
    notes = [f"little data: {said}" for said in (cluster.hardware.little_data, model.little_data) if said]
    notes += _notes(best, workload, cluster)
    if fixed is None and (parts := unequal(model, cluster, workload, slo, efficiency, options, best)):
        notes.append(told(parts))
    return Plan(
        model, cluster, workload, slo, best, candidates[1:], numbers, reasons, met, notes, options.acceptance,
        rates,
    )  # fmt: skip


def extrapolations(model: PlannedModel, cluster: Cluster, workload: Workload, chosen: Candidate) -> list[str]:
    """What this plan has and no public row has."""
    if cluster.hardware.measured_on is not None:
        return []
    return beyond(place(model, cluster.hardware.name, chosen.layout, workload))


def _numbers(
    model: PlannedModel, cluster: Cluster, workload: Workload, chosen: Candidate, rates: NodeRates,
    acceptance: float | Acceptance | None,
) -> dict[str, Range]:  # fmt: skip
    held, p = chosen.prediction.memory, chosen.prediction
    own = float(sum(held.weights.values()))
    if model.stored_bytes is not None:
        total = Range(model.stored_bytes, model.stored_bytes, model.stored_bytes, "measured")
    else:
        stored = [
            weights.stored_bytes(model, head, copies) for head, copies in ((False, True), (False, False), (True, True))
        ]
        total = Range(stored[0], stored[1], stored[2], "derived")
    budgets = [held.budget_low, held.budget, held.budget_high]
    longest = [min(model.config.max_position_embeddings, held.tokens(b)) for b in budgets]
    most = [float(_concurrency(held, b, chosen, workload)) for b in budgets]
    here = place(model, cluster.hardware.name, chosen.layout, workload)
    spread = acceptance_spread(acceptance) if chosen.layout.decode.drafts else 0.0
    speed, each = (math.exp(math.hypot(half_width(name, here), spread)) for name in ("tok_s", "tpot"))
    first = math.exp(half_width("ttft", here))
    out, ttft = run_output(p, workload), run_ttft(p, workload)
    basis = "fitted" if cluster.hardware.efficiencies is None else "measured"
    token = held.bytes_per_token
    numbers = {
        "weight_bytes_total": total,
        "weight_bytes_per_die": Range(own, own, own, "derived"),
        "kv_bytes_per_token": Range(token, token, token, "derived"),
        "kv_budget_bytes_per_die": Range(budgets[1], budgets[0], budgets[2], "guessed"),
        "max_context_tokens": Range(longest[1], longest[0], longest[2], "guessed"),
        "max_concurrency": Range(most[1], most[0], most[2], "guessed"),
        "tpot_ms": Range(1e3 * p.tpot, 1e3 * p.tpot / each, 1e3 * p.tpot * each, basis),
        "ttft_ms": Range(1e3 * ttft, 1e3 * ttft / first, 1e3 * ttft * first, basis),
        "output_tokens_per_s": Range(out, out / speed, out * speed, basis),
    }
    for name, value in spending(cluster, chosen.layout, p, workload, out, rates).items():
        numbers[name] = Range(value, value / speed, value * speed, basis)
    return numbers


def _concurrency(held: memory.Memory, budget: float, chosen: Candidate, workload: Workload) -> int:
    """Requests of this workload whose whole contexts fit at once, all ranks and replicas together."""
    shared = cache.pages(workload.prompt * workload.prefix_hit) if workload.prefix_hit else 0
    own = cache.pages(workload.prompt + workload.output - shared)
    per_rank = max(0, (held.tokens(budget) - shared) // own)
    return per_rank * chosen.layout.decode.dp * chosen.layout.replicas


def _notes(chosen: Candidate, workload: Workload, cluster: Cluster) -> list[str]:
    notes = []
    held, links = chosen.prediction.memory, cluster.hardware.links
    if links.pod is not None and cluster.nodes > 1:
        notes.append(
            f"assumed: the nodes are one supernode (UB, up to {links.pod.nodes} nodes); without: --hardware a3-roce"
        )
    if held.budget_low < 0 < held.budget:
        notes.append("it fits only if graphs, buffers and fragmentation take less than the high end of their range")
    one = chosen.layout.prefill or chosen.layout.decode
    if workload.fresh > LONG_PROMPT and one.tp > 1 and not one.split_prefill:
        notes.append(
            "without DSA-CP every die scores the whole prompt: dsa_cp=1 in --layout divides that; it needs FlashComm,"
            " with which W4A8 lost its drafts in 0.20 and 0.21 (vllm-ascend 9803)"
        )
    if chosen.layout.decode.dcp > 1 and workload.prefix_hit:
        notes.append("with DCP prefixes are not found again (vllm-ascend 13750): the hits are not counted")
    if chosen.prediction.bound == "memory":
        notes.append(f"cache memory holds {chosen.prediction.running:.0f} requests at a time, the others wait")
    if workload.requests is not None and workload.requests <= 2 * workload.concurrency and workload.rate is None:
        notes.append("in a run this short most requests wait for others' prefill: --tails has their TTFT")
    return notes


def _nothing_fits(
    model: PlannedModel, cluster: Cluster, workload: Workload, tried: list[Layout], named: bool
) -> tuple[str, str]:
    """What is missing in the layout that misses least; `named`: the one the user gave."""
    best, most = None, -math.inf
    for layout in tried:
        split = layout.prefill is not None
        for one, decodes in ((layout.decode, split), *([(layout.prefill, False)] if layout.prefill else [])):
            held = memory.fit(model, cluster.hardware, one, decodes, split)
            need = cache.pages(workload.prompt + workload.output) * held.bytes_per_token
            if held.budget - need > most or (named and held.budget < need):
                best, most = (one, held, need), held.budget - need
    if best is None:
        return f"no layout of {cluster.nodes} x {cluster.hardware.name} is possible", "use another number of nodes"
    one, held, need = best
    which = "layout" if named else "best layout"
    return (
        f"{model.name} {model.quantization} does not fit {cluster.nodes} x {cluster.hardware.name}: {which} "
        f"{one}, weights {sum(held.weights.values()) / 1e9:.1f} GB of {held.usable / 1e9:.1f} GB usable per "
        f"die leave {held.budget / 1e9:.1f} GB, one request needs {need / 1e9:.1f} GB",
        "leave out --layout: the search tries others"
        if named
        else "use more nodes, a smaller --quant, or a shorter context",
    )
