"""Throughput against latency as the number of concurrent requests grows, for one layout."""

from __future__ import annotations

from dataclasses import dataclass, replace

from glm5_ascend.plan.efficiency import efficiencies_of
from glm5_ascend.plan.predict import predict
from glm5_ascend.plan.result import Plan

FACTORS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 1.5, 2.0, 3.0, 4.0)


@dataclass(frozen=True)
class Point:
    """Milliseconds per token, output tokens per second, at so many requests."""

    concurrency: float
    tpot_ms: float
    output_per_second: float
    chosen: bool


def frontier(plan: Plan) -> list[Point]:
    """Points of the chosen layout at fractions and multiples of the workload's concurrency; at least one request."""
    found, seen, hardware = [], set(), plan.cluster.hardware
    for factor in FACTORS:
        load = replace(plan.workload, concurrency=max(1.0, plan.workload.concurrency * factor), rate=None)
        if load.concurrency in seen:
            continue
        seen.add(load.concurrency)
        layout = plan.chosen.layout
        needed = max(1, round(load.concurrency / layout.replicas / layout.decode.dp))
        grown = replace(layout.decode, sequences=max(layout.decode.sequences, needed))
        if load.concurrency == plan.workload.concurrency:  # the plan itself, with its rate and the length of its run
            n = plan.numbers
            found.append(Point(load.concurrency, n["tpot_ms"].value, n["output_tokens_per_s"].value, True))
            continue
        wider = replace(layout, decode=grown)
        if p := predict(plan.model, hardware, wider, efficiencies_of(hardware), load, plan.acceptance):
            found.append(Point(load.concurrency, 1e3 * p.tpot, p.output_per_second, False))
    return found
