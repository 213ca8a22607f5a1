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
    found, seen = [], set()
    for factor in FACTORS:
        load = replace(plan.workload, concurrency=max(1.0, plan.workload.concurrency * factor), rate=None)
        if load.concurrency in seen:
            continue
        seen.add(load.concurrency)
        layout = plan.chosen.layout
        needed = max(1, round(load.concurrency / layout.replicas / layout.decode.dp))
        grown = replace(layout.decode, sequences=max(layout.decode.sequences, needed))
        p = predict(
            plan.model,
            plan.cluster.hardware,
            replace(layout, decode=grown),
            efficiencies_of(plan.cluster.hardware),
            load,
        )
        if p is not None:
            found.append(Point(load.concurrency, 1e3 * p.tpot, p.output_per_second, factor == 1.0))
    return found
