"""The layouts a cluster allows, and the best of them under a workload and limits on latency."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from glm5_ascend.errors import PlanError
from glm5_ascend.plan.efficiency import Efficiencies, fitted
from glm5_ascend.plan.hardware import Cluster
from glm5_ascend.plan.layout import Engine, Layout, check_engine
from glm5_ascend.plan.model import PlannedModel
from glm5_ascend.plan.predict import Prediction, predict
from glm5_ascend.plan.workload import Slo, Workload

#: Draft tokens that are tried when none are named, and what everyone runs.
DRAFTS, PROVEN_DRAFTS = (0, 1, 3, 5), 3
#: Layouts of the first round that are tried with other numbers of drafts.
FINALISTS = 4
#: What the official prefill nodes run with (CI of vllm-ascend).
PREFILL_TOKENS, PREFILL_BUFFER_MB, PREFILL_DRAFTS = 8192, 400, 1
MOST_SEQUENCES = 256


@dataclass(frozen=True)
class Candidate:
    """A layout and its steady state."""

    layout: Layout
    prediction: Prediction


@dataclass(frozen=True)
class Options:
    """What the user fixed; None: the search decides."""

    drafts: int | None = None
    sequences: int | None = None
    utilization: float = 0.95
    batched_tokens: int = 4096
    buffer_mb: int = 200
    acceptance: float | None = None


def engine(tp: int, dp: int, dcp: int, workload: Workload, replicas: int, options: Options) -> Engine:
    """An engine with the number of sequences its share of the workload needs."""
    needed = math.ceil(workload.concurrency / replicas / dp)
    return Engine(
        tp, dp, dcp, PROVEN_DRAFTS if options.drafts is None else options.drafts,
        options.sequences or max(1, min(MOST_SEQUENCES, needed)), options.batched_tokens, options.utilization,
        options.buffer_mb,
    )  # fmt: skip


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def layouts(model: PlannedModel, cluster: Cluster, workload: Workload, options: Options) -> Iterator[Layout]:
    """Everything the engine would accept on this cluster, with three drafts unless they are fixed."""
    hardware, experts = cluster.hardware, model.config.n_routed_experts
    if hardware.dies_per_node > experts:  # a small model: several engines on a node
        for dies in (d for d in _divisors(hardware.dies_per_node) if d <= experts):
            yield from _whole(model, cluster, workload, options, dies, cluster.dies // dies)
        return
    for nodes in _divisors(cluster.nodes):
        replicas, dies = cluster.nodes // nodes, nodes * hardware.dies_per_node
        yield from _whole(model, cluster, workload, options, dies, replicas)
        for first in {nodes // 4, nodes // 2, nodes - nodes // 4} - {0, nodes}:  # nodes that only prefill
            before, behind = first * hardware.dies_per_node, (nodes - first) * hardware.dies_per_node
            if before > experts or behind > experts:
                continue
            for tp in (t for t in (8, 16) if _divides(t, before, model, hardware.dies_per_node)):
                ahead = Engine(
                    tp, before // tp, 1, PREFILL_DRAFTS if options.drafts != 0 else 0, 64, PREFILL_TOKENS,
                    options.utilization, PREFILL_BUFFER_MB, eager_decode=True,
                )  # fmt: skip
                for whole in _whole(model, cluster, workload, options, behind, replicas):
                    if whole.decode.dcp == 1:
                        tokens = whole.decode.sequences * (whole.decode.drafts + 1)
                        yield replace(whole, decode=replace(whole.decode, batched_tokens=tokens), prefill=ahead)


def _divides(tp: int, dies: int, model: PlannedModel, dies_per_node: int) -> bool:
    return dies % tp == 0 and tp <= dies_per_node and model.config.num_attention_heads % tp == 0


def _whole(
    model: PlannedModel, cluster: Cluster, workload: Workload, options: Options, dies: int, replicas: int
) -> Iterator[Layout]:
    if dies > model.config.n_routed_experts:
        return
    for tp in (t for t in _divisors(dies) if _divides(t, dies, model, cluster.hardware.dies_per_node)):
        for dcp in (1, tp) if tp > 1 else (1,):
            yield Layout(engine(tp, dies // tp, dcp, workload, replicas, options), None, replicas)


def search(
    model: PlannedModel, cluster: Cluster, workload: Workload, slo: Slo, efficiency: Efficiencies, options: Options
) -> list[Candidate]:
    """All layouts that fit, best first: those within the limits by throughput, then the others by how far off."""

    def judged(layout: Layout) -> Candidate | None:
        found = predict(model, cluster.hardware, layout, efficiency, workload, options.acceptance)
        return Candidate(layout, found) if found else None

    every = list(layouts(model, cluster, workload, options))
    found = [c for layout in every if layout.decode.dcp == 1 and (c := judged(layout))]
    if not found or min(found, key=lambda c: rank(c, slo)).prediction.bound == "memory":
        # DCP has no public result behind it: it is for contexts that do not fit otherwise.
        found += [c for layout in every if layout.decode.dcp > 1 and (c := judged(layout))]
    found.sort(key=lambda c: rank(c, slo))
    if options.drafts is None:
        for chosen in found[:FINALISTS]:
            for drafts in DRAFTS:
                decode = replace(chosen.layout.decode, drafts=drafts)
                if chosen.layout.prefill is not None:
                    decode = replace(decode, batched_tokens=decode.sequences * (drafts + 1))
                other = replace(chosen.layout, decode=decode)
                if drafts != chosen.layout.decode.drafts and (candidate := judged(other)):
                    found.append(candidate)
        found.sort(key=lambda c: rank(c, slo))
    return found


def rank(candidate: Candidate, slo: Slo) -> tuple[float, float]:
    """Sorts best first. All public results draft 3 tokens: another number must gain more than the band of an error."""
    p = candidate.prediction
    sure = 1.0 if candidate.layout.decode.drafts == PROVEN_DRAFTS else math.exp(-fitted().band)
    over = max(p.tpot / slo.tpot if slo.tpot else 0.0, p.ttft / slo.ttft if slo.ttft else 0.0)
    return (0.0 if slo.met(p.tpot, p.ttft) else over, -sure * p.output_per_second)


_LAYOUT_KEYS = ("tp", "dp", "dcp", "replicas", "prefill_tp", "prefill_dp")


def parse_layout(text: str, model: PlannedModel, cluster: Cluster, workload: Workload, options: Options) -> Layout:
    """`tp=16,dp=2` or `tp=1,dp=32,prefill_tp=8,prefill_dp=4`.

    Raises:
        PlanError: a wrong key or number, or a layout that is impossible on this cluster.
    """
    values: dict[str, int] = {}
    for item in text.split(","):
        key, _, value = item.partition("=")
        if key.strip() not in _LAYOUT_KEYS:
            raise PlanError(f"--layout: unknown key {key.strip()!r}", f"known: {', '.join(_LAYOUT_KEYS)}")
        if not value.strip().isdecimal() or int(value) < 1:
            raise PlanError(f"--layout: {key.strip()}={value.strip()!r} is not a whole number above 0", "as in tp=16")
        values[key.strip()] = int(value)
    if "tp" not in values:
        raise PlanError("--layout: tp= is missing", "--layout tp=16,dp=1")
    if ("prefill_tp" in values) != ("prefill_dp" in values):
        raise PlanError("--layout: prefill_tp and prefill_dp belong together", "give both or none")
    replicas = values.get("replicas", 1)
    decode = engine(values["tp"], values.get("dp", 1), values.get("dcp", 1), workload, replicas, options)
    first = None
    if "prefill_tp" in values:
        first = Engine(
            values["prefill_tp"], values["prefill_dp"], 1, PREFILL_DRAFTS if options.drafts != 0 else 0, 64,
            PREFILL_TOKENS, options.utilization, PREFILL_BUFFER_MB, eager_decode=True,
        )  # fmt: skip
        check_engine(first, model.config, cluster.hardware)
        decode = replace(decode, batched_tokens=decode.sequences * (decode.drafts + 1))
    check_engine(decode, model.config, cluster.hardware)
    layout = Layout(decode, first, replicas)
    if layout.dies != cluster.dies:
        raise PlanError(
            f"--layout {text}: takes {layout.dies} dies, {cluster.nodes} x {cluster.hardware.name} has {cluster.dies}",
            "tp x dp (of prefill and decode together, times replicas) must be the number of dies",
        )
    return layout
