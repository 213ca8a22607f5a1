"""A plan: the best layout, its memory and speed with ranges, and the basis of each number."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from glm5_ascend.errors import PlanError
from glm5_ascend.plan import cache, memory, unequal, weights
from glm5_ascend.plan.distance import coordinates, extrapolations, half_width
from glm5_ascend.plan.efficiency import efficiencies_of
from glm5_ascend.plan.hardware import Cluster
from glm5_ascend.plan.layout import Layout
from glm5_ascend.plan.layouts import SearchOptions, aggregated
from glm5_ascend.plan.model import PlannedModel
from glm5_ascend.plan.predict import predict, run_output, run_ttft
from glm5_ascend.plan.search import Candidate, parse_layout, search
from glm5_ascend.plan.spending import spending
from glm5_ascend.plan.workload import Acceptance, Slo, Workload, acceptance_spread

#: Prompt tokens from which the indexer takes a large part of a prefill.
LONG_PROMPT = 16_384


@dataclass(frozen=True)
class Range:
    """A number, its range, and its basis: measured | derived | fitted | guessed."""

    value: float
    low: float
    high: float
    basis: str

    def to_json(self) -> dict[str, Any]:
        def rounded(x: float) -> float | int:
            return int(x) if float(x).is_integer() and abs(x) > 1000 else float(f"{x:.5g}")

        return {
            "value": rounded(self.value), "low": rounded(self.low), "high": rounded(self.high), "basis": self.basis
        }  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """The best layout; `others` are the next best layouts, best first."""

    model: PlannedModel
    cluster: Cluster
    workload: Workload
    slo: Slo
    best: Candidate
    others: list[Candidate]
    numbers: dict[str, Range]
    extrapolated: list[str]
    within_slo: bool
    notes: list[str] = field(default_factory=list)
    acceptance: float | Acceptance | None = None


@dataclass(frozen=True)
class PlanCommands:
    """The deployment profile with the plan's layout, if there is one, and command lines that run the plan."""

    profile: str | None = None
    lines: tuple[str, ...] = ()


def make_plan(
    model: PlannedModel, cluster: Cluster, workload: Workload, slo: Slo, options: SearchOptions,
    layout: str | None = None, price: float | None = None,
) -> Plan:  # fmt: skip
    """Search for the best layout, or evaluate the given one.

    Args:
        layout: text of --layout. price: of one node and hour.

    Raises:
        PlanError: the context is longer than the model's, or nothing fits; with the missing bytes.
    """
    context = workload.prompt + workload.output
    if context > model.config.max_position_embeddings:
        raise PlanError(
            f"--workload: {workload.prompt} + {workload.output} tokens, {model.name} has "
            f"{model.config.max_position_embeddings} positions",
            "shorten in= or out=",
        )
    efficiency, fixed = efficiencies_of(cluster.hardware), None
    if layout is not None:
        fixed = parse_layout(layout, model, cluster, workload, options)
        prediction = predict(model, cluster.hardware, fixed, efficiency, workload, options.acceptance)
        candidates = [Candidate(fixed, prediction)] if prediction else []
    else:
        candidates = search(model, cluster, workload, slo, efficiency, options)
    if not candidates:
        layouts = [fixed] if fixed else list(aggregated(model, cluster, workload, options))
        raise _nothing_fits(model, cluster, workload, layouts, fixed is not None)
    best = candidates[0]
    notes = [f"little data: {text}" for text in (cluster.hardware.little_data, model.little_data) if text]
    notes += _notes(best, workload, cluster)
    if fixed is None:
        parts = unequal.unequal(model, cluster, workload, slo, efficiency, options, best)
        notes += [unequal.describe(parts)] if parts else []
    extrapolated = []
    if cluster.hardware.measured_on is None:
        extrapolated = extrapolations(coordinates(model, cluster.hardware.name, best.layout, workload))
    return Plan(
        model=model,
        cluster=cluster,
        workload=workload,
        slo=slo,
        best=best,
        others=candidates[1:],
        numbers=_numbers(model, cluster, workload, best, price, options.acceptance),
        extrapolated=extrapolated,
        within_slo=best.meets(slo),
        notes=notes,
        acceptance=options.acceptance,
    )


def _numbers(
    model: PlannedModel, cluster: Cluster, workload: Workload, best: Candidate, price: float | None,
    acceptance: float | Acceptance | None,
) -> dict[str, Range]:  # fmt: skip
    prediction = best.prediction
    here = coordinates(model, cluster.hardware.name, best.layout, workload)
    spread = acceptance_spread(acceptance) if best.layout.decode.drafts else 0.0
    speed, tpot = (math.exp(math.hypot(half_width(name, here), spread)) for name in ("tok_s", "tpot"))
    basis = "fitted" if cluster.hardware.efficiencies is None else "measured"

    def with_factor(value: float, factor: float) -> Range:
        return Range(value, value / factor, value * factor, basis)

    output = run_output(prediction, workload)
    numbers = _memory_numbers(model, workload, best) | {
        "tpot_ms": with_factor(1e3 * prediction.tpot, tpot),
        "ttft_ms": with_factor(1e3 * run_ttft(prediction, workload), math.exp(half_width("ttft", here))),
        "output_tokens_per_s": with_factor(output, speed),
    }
    for name, value in spending(cluster, best.layout, prediction, workload, output, price).items():
        numbers[name] = with_factor(value, speed)
    return numbers


def _memory_numbers(model: PlannedModel, workload: Workload, best: Candidate) -> dict[str, Range]:
    free = best.prediction.memory
    if model.stored_bytes is not None:
        total = Range(model.stored_bytes, model.stored_bytes, model.stored_bytes, "measured")
    else:
        value, low, high = (
            weights.stored_bytes(model, fp32_head, copies)
            for fp32_head, copies in ((False, True), (False, False), (True, True))
        )
        total = Range(value, low, high, "derived")
    per_die, per_token = float(sum(free.weights.values())), free.bytes_per_token
    budgets = [free.budget, free.budget_low, free.budget_high]
    contexts = [float(min(model.config.max_position_embeddings, free.tokens(budget))) for budget in budgets]
    requests = [float(_concurrency(free, budget, best.layout, workload)) for budget in budgets]
    return {
        "weight_bytes_total": total,
        "weight_bytes_per_die": Range(per_die, per_die, per_die, "derived"),
        "kv_bytes_per_token": Range(per_token, per_token, per_token, "derived"),
        "kv_budget_bytes_per_die": _guessed(budgets),
        "max_context_tokens": _guessed(contexts),
        "max_concurrency": _guessed(requests),
    }


def _guessed(values: list[float]) -> Range:
    value, low, high = values
    return Range(value, low, high, "guessed")


def _concurrency(free: memory.Memory, budget: float, layout: Layout, workload: Workload) -> int:
    """Requests of this workload whose whole contexts fit at once, in all ranks and replicas."""
    shared = cache.pages(workload.prompt * workload.prefix_hit) if workload.prefix_hit else 0
    per_request = cache.pages(workload.prompt + workload.output - shared)
    per_rank = max(0, (free.tokens(budget) - shared) // per_request)
    return per_rank * layout.decode.dp * layout.replicas


def _notes(best: Candidate, workload: Workload, cluster: Cluster) -> list[str]:
    notes = []
    free, links, layout = best.prediction.memory, cluster.hardware.links, best.layout
    if links.pod is not None and cluster.nodes > 1:
        notes.append(
            f"assumed: the nodes are one supernode (UB, up to {links.pod.nodes} nodes); otherwise --hardware a3-roce"
        )
    if free.budget_low < 0 < free.budget:
        notes.append("it fits only if graphs, buffers and fragmentation take less than the high end of their range")
    prefill = layout.prefill or layout.decode
    if workload.fresh > LONG_PROMPT and prefill.tp > 1 and not prefill.split_prefill:
        notes.append(
            "without DSA-CP every die scores the whole prompt: dsa_cp=1 in --layout divides that; it needs FlashComm,"
            " with which W4A8 lost its drafts in 0.20 and 0.21 (vllm-ascend 9803)"
        )
    if layout.decode.dcp > 1 and workload.prefix_hit:
        notes.append("with DCP the prefix cache has no hits (vllm-ascend 13750): prefix_hit is not counted")
    if best.prediction.bound == "memory":
        notes.append(f"cache memory holds {best.prediction.running:.0f} requests at a time, the others wait")
    if workload.requests is not None and workload.requests <= 2 * workload.concurrency and workload.rate is None:
        notes.append("in a run this short most requests wait for the prefill of others: --tails has their TTFT")
    return notes


def _nothing_fits(
    model: PlannedModel, cluster: Cluster, workload: Workload, layouts: list[Layout], by_user: bool
) -> PlanError:
    """The error about the layout that misses fewest bytes; `by_user`: the user gave the only layout."""
    best, best_excess = None, -math.inf
    for layout in layouts:
        split = layout.prefill is not None
        for engine, decode_only in ((layout.decode, split), *([(layout.prefill, False)] if layout.prefill else [])):
            free = memory.fit(model, cluster.hardware, engine, decode_only, split)
            need = cache.pages(workload.prompt + workload.output) * free.bytes_per_token
            if free.budget - need > best_excess or (by_user and free.budget < need):
                best, best_excess = (engine, free, need), free.budget - need
    if best is None:
        return PlanError(
            f"no layout of {cluster.nodes} x {cluster.hardware.name} is possible", "use another number of nodes"
        )
    engine, free, need = best
    return PlanError(
        f"{model.name} {model.quantization} does not fit {cluster.nodes} x {cluster.hardware.name}: "
        f"{'layout' if by_user else 'best layout'} {engine}, weights {sum(free.weights.values()) / 1e9:.1f} GB of "
        f"{free.usable / 1e9:.1f} GB usable per die leave {free.budget / 1e9:.1f} GB, one request needs "
        f"{need / 1e9:.1f} GB",
        "leave out --layout: the search tries others"
        if by_user
        else "use more nodes, a smaller --quant, or a shorter context",
    )
