"""Queueing and tails of a plan: the scheduler simulated with random arrivals, or with clients that ask again."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from glm5_ascend.plan import memory
from glm5_ascend.plan.costs import Costs, costs
from glm5_ascend.plan.efficiency import Efficiencies, efficiencies_of
from glm5_ascend.plan.hardware import Hardware
from glm5_ascend.plan.layout import Engine, Layout
from glm5_ascend.plan.model import PlannedModel
from glm5_ascend.plan.result import Plan
from glm5_ascend.plan.roofline import LINK
from glm5_ascend.plan.simulate import Trace, simulate, simulate_apart
from glm5_ascend.plan.workload import Acceptance, Workload

#: Requests of a simulation: enough for a 99th percentile.
REQUESTS = 4000


@dataclass(frozen=True)
class Arrivals:
    """How requests come: at random, so many per second; or `closed`, clients that ask again when they are answered."""

    rate: float
    closed: bool = False
    requests: int = REQUESTS
    seed: int = 0


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
    """Means and percentiles (seconds) of one replica of the plan's layout.

    Arrivals are random at the workload's rate, or at the predicted throughput's where it names none; without a
    prefill engine and without a rate the workload's clients each ask again when they are answered.
    """
    load, hardware = plan.workload, plan.cluster.hardware
    rate = load.rate or plan.chosen.prediction.output_per_second / load.output
    closed = plan.chosen.layout.prefill is None and load.rate is None
    arrivals = Arrivals(rate, closed, requests, seed)
    return replica_tails(
        plan.model, hardware, plan.chosen.layout, efficiencies_of(hardware), load, arrivals, plan.acceptance
    )


def replica_tails(
    model: PlannedModel, hardware: Hardware, layout: Layout, efficiency: Efficiencies, load: Workload,
    arrivals: Arrivals, acceptance: float | Acceptance | None = None,
) -> dict[str, float]:  # fmt: skip
    """The same for any layout; rate and the workload's concurrency are those of all replicas together.

    A workload of so many requests is simulated as that run, all lengths alike.
    """
    requests, spread = arrivals.requests, 0.5
    if load.requests is not None:
        requests, spread = math.ceil(load.requests / layout.replicas), 0.0
    trace = make_trace(load, requests, arrivals.rate / layout.replicas, arrivals.seed, spread)
    split = layout.prefill is not None
    table = engine_costs(model, hardware, layout.decode, efficiency, load, split, split, acceptance)
    if layout.prefill is None:
        clients = max(1, round(load.concurrency / layout.replicas)) if arrivals.closed else 0
        return simulate(table, trace, clients).summary()
    ahead = engine_costs(model, hardware, layout.prefill, efficiency, load, split=True)
    shared = max(1, round(ahead.ranks * layout.prefill_engines / layout.replicas))
    ahead = replace(ahead, ranks=shared)  # of all prefill engines, those that feed one decode engine
    link = hardware.link(layout.decode.dies + layout.prefill.dies)
    moved = load.prompt * memory.fit(model, hardware, layout.decode).bytes_per_token
    return simulate_apart(ahead, table, trace, moved / (link.bandwidth * LINK) / layout.prefill.tp).summary()


def engine_costs(
    model: PlannedModel, hardware: Hardware, engine: Engine, efficiency: Efficiencies, load: Workload,
    decode_only: bool = False, split: bool = False, acceptance: float | Acceptance | None = None,
) -> Costs:  # fmt: skip
    """Tables of one engine for requests like the workload's."""
    context = load.prompt + load.output / 2
    table = costs(model, hardware, engine, efficiency, context, decode_only, split, acceptance)
    shared = int(load.prompt * load.prefix_hit)
    # The prefix all requests share is stored once per rank: room is counted as if each had its own copy.
    return replace(table, room=table.room + shared * max(0, engine.sequences - 1))
