"""Queueing and tails of a plan: the scheduler simulated with random arrivals, or with a fixed number of clients."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from glm5_ascend.plan import memory
from glm5_ascend.plan.efficiency import Efficiencies, efficiencies_of
from glm5_ascend.plan.hardware import Hardware
from glm5_ascend.plan.layout import Engine, Layout
from glm5_ascend.plan.model import PlannedModel
from glm5_ascend.plan.result import Plan
from glm5_ascend.plan.roofline import LINK, decode_step, prefill_chunk
from glm5_ascend.plan.simulate import Costs, Trace, simulate, simulate_disaggregated
from glm5_ascend.plan.workload import Acceptance, Workload, accepted

#: Requests of a simulation: enough for a 99th percentile.
REQUESTS = 4000


@dataclass(frozen=True)
class Arrivals:
    """Arrival of requests: random, `rate` per second; or `closed`, clients that wait for their answer."""

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

    Arrivals are random at the workload's rate. Without a rate an engine that prefills and decodes serves the
    workload's clients, and separate engines get random arrivals at the predicted throughput.
    """
    load, hardware = plan.workload, plan.cluster.hardware
    rate = load.rate or plan.best.prediction.output_per_second / load.output
    closed = plan.best.layout.prefill is None and load.rate is None
    arrivals = Arrivals(rate, closed, requests, seed)
    return replica_tails(
        plan.model, hardware, plan.best.layout, efficiencies_of(hardware), load, arrivals, plan.acceptance
    )


def replica_tails(
    model: PlannedModel, hardware: Hardware, layout: Layout, efficiency: Efficiencies, load: Workload,
    arrivals: Arrivals, acceptance: float | Acceptance | None = None,
) -> dict[str, float]:  # fmt: skip
    """Means and percentiles (seconds) of one replica of a layout.

    Rate and concurrency are those of all replicas together. A workload with a number of requests is simulated as that
    run, with equal lengths.
    """
    requests, spread = arrivals.requests, 0.5
    if load.requests is not None:
        requests, spread = math.ceil(load.requests / layout.replicas), 0.0
    trace = make_trace(load, requests, arrivals.rate / layout.replicas, arrivals.seed, spread)
    split = layout.prefill is not None
    decode = engine_costs(model, hardware, layout.decode, efficiency, load, split, split, acceptance)
    if layout.prefill is None:
        clients = max(1, round(load.concurrency / layout.replicas)) if arrivals.closed else 0
        return simulate(decode, trace, clients).summary()
    prefill = engine_costs(model, hardware, layout.prefill, efficiency, load, split=True)
    ranks = max(1, round(prefill.ranks * layout.prefill_engines / layout.replicas))  # that feed one decode engine
    link = hardware.link(layout.decode.dies + layout.prefill.dies)
    nbytes = load.prompt * memory.fit(model, hardware, layout.decode).bytes_per_token
    transfer = nbytes / (link.bandwidth * LINK) / layout.prefill.tp
    return simulate_disaggregated(replace(prefill, ranks=ranks), decode, trace, transfer).summary()


def engine_costs(
    model: PlannedModel, hardware: Hardware, engine: Engine, efficiency: Efficiencies, load: Workload,
    decode_only: bool = False, split: bool = False, acceptance: float | Acceptance | None = None,
) -> Costs:  # fmt: skip
    """Cost tables of one engine for requests of the workload's size."""
    context = load.prompt + load.output / 2
    batches = np.unique(np.round(np.geomspace(1, engine.sequences, 12)))
    seconds = [decode_step(model, hardware, engine, efficiency, float(n), context).seconds for n in batches]
    step = np.interp(np.arange(engine.sequences + 1), batches, seconds)
    step[0] = 0.0
    lengths = [accepted(n, acceptance) for n in range(engine.drafts + 1)]
    gains = np.diff(lengths)  # chance that this many drafts are accepted
    chances = tuple(float(gain / before) for gain, before in zip(gains, [1.0, *gains], strict=False))
    free_tokens = memory.fit(model, hardware, engine, decode_only, split).tokens()
    # A rank stores the shared prefix once, but the simulator counts it for each request: the capacity grows by it.
    shared = int(load.prompt * load.prefix_hit)
    capacity = free_tokens + shared * max(0, engine.sequences - 1)
    prefill = _prefill_plane(model, hardware, engine, efficiency, context)
    return Costs(engine.dp, engine.sequences, capacity, engine.batched_tokens, lengths[-1], step, prefill, chances)


def _prefill_plane(
    model: PlannedModel, hardware: Hardware, engine: Engine, efficiency: Efficiencies, context: float
) -> tuple[float, float, float]:
    """Fit a plane through chunks of three sizes and two contexts, by least squares; no coefficient is negative."""
    rows, values = [], []
    for tokens in (engine.batched_tokens, engine.batched_tokens / 2, engine.batched_tokens / 4):
        for start in (0.0, context):
            rows.append((1.0, tokens, tokens * (start + tokens / 2)))
            values.append(prefill_chunk(model, hardware, engine, efficiency, tokens, start).seconds)
    a = np.array(rows) / np.array(values)[:, None]  # relative errors count
    plane = np.linalg.lstsq(a, np.ones(len(values)), rcond=None)[0]
    fixed, token, pair = (max(0.0, float(x)) for x in plane)
    return fixed, token, pair
