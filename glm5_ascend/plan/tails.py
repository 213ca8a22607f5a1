"""Queueing and tails of a plan: the scheduler simulated with random arrivals, or with clients that ask again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from glm5_ascend.plan.costs import Costs, costs
from glm5_ascend.plan.efficiency import efficiencies_of
from glm5_ascend.plan.layout import Engine
from glm5_ascend.plan.result import Plan
from glm5_ascend.plan.simulate import Outcome, Trace, simulate, simulate_apart
from glm5_ascend.plan.workload import Workload

#: Requests of a simulation: enough for a 99th percentile.
REQUESTS = 4000
#: Share of a link's rate a transfer of caches reaches; a guess, as for collectives.
_LINK = 0.6


def make_trace(load: Workload, requests: int, rate: float, seed: int = 0, spread: float = 0.5) -> Trace:
    """Poisson arrivals at `rate` per second; lengths uniform within +-`spread` of the workload's."""
    random = np.random.default_rng(seed)
    arrival = np.cumsum(random.exponential(1.0 / rate, requests))

    def lengths(mean: float) -> NDArray[np.int64]:
        drawn: NDArray[np.int64] = np.rint(mean * random.uniform(1 - spread, 1 + spread, requests)).astype(np.int64)
        return np.maximum(1, drawn)

    prompt = lengths(load.prompt)
    cached = (prompt * load.prefix_hit).astype(np.int64)
    return Trace(arrival, prompt - cached, cached, lengths(load.output))


def tails(plan: Plan, requests: int = REQUESTS, seed: int = 0) -> dict[str, float]:
    """Means and percentiles (seconds) of one replica of the chosen layout.

    Arrivals are random at the workload's rate, or at the predicted throughput's where it names none; without a
    prefill engine and without a rate the workload's clients each ask again when they are answered.
    """
    layout, load = plan.chosen.layout, plan.workload
    rate = (load.rate or plan.chosen.prediction.output_per_second / load.output) / layout.replicas
    trace = make_trace(load, requests, rate, seed)
    table = engine_costs(plan, layout.decode)
    if layout.prefill is None:
        closed = 0 if load.rate else max(1, round(load.concurrency / layout.replicas))
        return simulate(table, trace, closed).summary()
    return _apart(plan, table, trace).summary()


def _apart(plan: Plan, table: Costs, trace: Trace) -> Outcome:
    first = plan.chosen.layout.prefill
    assert first is not None
    hardware = plan.cluster.hardware
    link = hardware.link(plan.chosen.layout.decode.dies + first.dies)
    moved = plan.workload.prompt * plan.chosen.prediction.memory.bytes_per_token
    return simulate_apart(engine_costs(plan, first), table, trace, moved / (link.bandwidth * _LINK) / first.tp)


def engine_costs(plan: Plan, engine: Engine) -> Costs:
    split = plan.chosen.layout.prefill is not None
    context = plan.workload.prompt + plan.workload.output / 2
    table = costs(
        plan.model, plan.cluster.hardware, engine, efficiencies_of(plan.cluster.hardware), context,
        decode_only=split and engine is plan.chosen.layout.decode, split=split,
    )  # fmt: skip
    shared = int(plan.workload.prompt * plan.workload.prefix_hit)
    # The prefix all requests share is stored once per rank: room is counted as if each had its own copy.
    copies = max(0, engine.sequences - 1)
    return replace(table, room=table.room + shared * copies)
