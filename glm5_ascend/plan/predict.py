"""Steady state of a deployment: latency, throughput, and what limits them.

A closed system: `concurrency` requests are in it at all times. The residence time of a request gives the throughput.
The throughput gives how many requests decode at once and how often a prefill blocks them, and that gives the residence
time. The one unknown, the request rate, is found by bisection.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from glm5_ascend.plan import cache, memory
from glm5_ascend.plan.efficiency import Efficiencies
from glm5_ascend.plan.hardware import Hardware
from glm5_ascend.plan.layout import Engine, Layout
from glm5_ascend.plan.memory import Memory
from glm5_ascend.plan.model import PlannedModel
from glm5_ascend.plan.roofline import LINK
from glm5_ascend.plan.timing import PromptTime, Timing, bisect
from glm5_ascend.plan.workload import Acceptance, Workload, accepted

#: Synchronization of prefills in a run whose requests have one length and start together: 0, ranks prefill
#: independently; 1, all ranks prefill at the same time. Fitted to the public runs; a simulation with lengths that
#: differ by 2 to 10 % gives the same.
PREFILL_SYNC = 0.5


@dataclass(frozen=True)
class Prediction:
    """Steady state of one layout under one workload: seconds, and tokens per second of the whole deployment.

    Attributes:
        running: requests that decode or prefill at once; the others wait.
        residence: seconds that a request runs.
        limited_by: resource that takes the largest part of a decode step.
        bound: limit of the throughput: decode | prefill | memory | arrivals.
        burst: additional seconds of the mean TTFT of a run's first requests, all sent at once.
        cold: additional seconds of these requests if the shared prefix is not cached yet.
        by_op: seconds of a decode step by operator. by_limit: the same by resource.
        memory: memory of a die of the decode engine. prefill_memory: the same of a separate prefill engine.
    """

    ttft: float
    tpot: float
    output_per_second: float
    running: float
    limited_by: str
    bound: str
    residence: float
    step_seconds: float
    prefill_seconds: float
    burst: float
    cold: float
    by_op: dict[str, float]
    by_limit: dict[str, float]
    memory: Memory
    prefill_memory: Memory | None = None


class Residence(NamedTuple):
    """Seconds that a request stays, and the part of them until its first token."""

    total: float
    first_token: float


def run_output(prediction: Prediction, load: Workload) -> float:
    """Output tokens per second of a run of `load.requests`, which ends when the last request is answered."""
    if load.requests is None:
        return prediction.output_per_second
    if prediction.bound == "memory":
        seconds = load.requests / prediction.running * prediction.residence
    else:
        # Request i starts when it is sent, and not before request i - `concurrency` has ended.
        rounds, last = divmod(load.requests - 1, load.concurrency)
        gap = 1.0 / load.rate if load.rate else 0.0
        seconds = max((load.requests - 1) * gap, last * gap + rounds * prediction.residence) + prediction.residence
    if not load.rate and load.concurrency > 1:
        seconds += prediction.burst  # the prompts of the first round arrive all at once
    if not load.warm:
        seconds += prediction.cold
    return load.requests * load.output / seconds


def run_ttft(prediction: Prediction, load: Workload) -> float:
    """Mean seconds to the first token in a run of `load.requests`."""
    if load.requests is None or load.rate:
        return prediction.ttft
    first_round = prediction.prefill_seconds + prediction.burst + (0.0 if load.warm else prediction.cold)
    share = min(1.0, load.concurrency / load.requests)  # of the requests that arrive together at the start
    return share * first_round + (1.0 - share) * prediction.ttft


def predict(
    model: PlannedModel,
    hardware: Hardware,
    layout: Layout,
    efficiency: Efficiencies,
    workload: Workload,
    acceptance: float | Acceptance | None = None,
    timing: Timing | None = None,
) -> Prediction | None:
    """Steady state of `layout` under the workload; None if not one request fits.

    Args:
        acceptance: mean accepted length measured with 3 drafts, or shares by position.
        timing: step times of this model, machine and efficiency that earlier calls computed.
    """
    clients = workload.concurrency
    if workload.requests is not None:
        clients = min(clients, float(workload.requests))
    load = Workload(
        workload.prompt, workload.output, clients / layout.replicas, workload.prefix_hit,
        workload.rate / layout.replicas if workload.rate else None, workload.requests,
    )  # fmt: skip
    if layout.decode.dcp > 1:
        load = replace(load, prefix_hit=0.0)  # hits disappear with DCP (vllm-ascend 13750)
    solve = _aggregated if layout.prefill is None else _disaggregated
    return solve(timing or Timing(model, hardware, efficiency), layout, load, acceptance)


def _aggregated(
    timing: Timing, layout: Layout, load: Workload, acceptance: float | Acceptance | None
) -> Prediction | None:
    """Solve an engine that prefills and decodes."""
    engine = layout.decode
    free = memory.fit(timing.model, timing.hardware, engine)
    rank_capacity = memory.most_requests(free, engine, load)
    if rank_capacity <= 0:
        return None
    running = min(load.concurrency, max(1.0, rank_capacity) * engine.dp)
    per_rank = max(1.0, running / engine.dp)
    decode_steps = _decode_steps(load, engine, acceptance)
    step = timing.step(engine, per_rank, load.prompt + load.output / 2)
    ranks = min(float(engine.dp), max(1.0, running))
    cached = load.prompt - load.fresh
    prompt = timing.prompt(engine, load.fresh, cached, ranks)
    sync = 0.0 if load.requests is None else PREFILL_SYNC
    mixed_step = step.seconds if running > 1 and load.output > 1 else 0.0  # decode work in the step of a chunk

    def residence(rate: float) -> Residence:
        """Residence time if `rate` requests end per second."""
        # A prefilling rank blocks all ranks: they meet at the experts in every layer. Ranks prefill independently, so
        # the share of time in which any of them prefills is less than the sum. A request is not blocked by its own.
        busy = min(0.999, rate * prompt.alone / engine.pp / ranks)
        busy_with_others = busy * (1.0 - 1.0 / max(1.0, running))
        any_rank_busy = 1.0 - (1.0 - busy_with_others) ** (ranks ** (1.0 - sync))
        first = prompt.alone + prompt.chunks * mixed_step * (1.0 - busy) + mixed_step / 2
        if per_rank > 1:  # wait for other prompts of the rank; clients that wait in turn meet rarely
            first += prompt.alone * busy * busy / 2 / (1.0 - busy) * (1.0 - 1.0 / per_rank)
        return Residence(first + decode_steps * step.seconds / (1.0 - min(0.98, any_rank_busy)), first)

    rate = bisect(lambda x: x * residence(x).total - running, ranks / prompt.service)
    bound = "decode" if running >= load.concurrency else "memory"
    if load.rate is not None and load.rate < rate:
        rate, bound = load.rate, "arrivals"
    stay, first_token = residence(rate)
    wait = max(0.0, load.concurrency / rate - stay) if bound == "memory" else 0.0
    if bound != "memory" and prompt.alone * rate / ranks > 0.5:
        bound = "prefill"
    return Prediction(
        ttft=first_token + wait,
        tpot=(stay - first_token) / max(1.0, load.output - 1),
        output_per_second=layout.replicas * rate * load.output,
        running=layout.replicas * rate * stay,
        limited_by=step.limit,
        bound=bound,
        residence=stay,
        step_seconds=step.seconds,
        prefill_seconds=prompt.alone,
        burst=_burst(prompt, per_rank),
        # few clients reach idle ranks one after the other: several rounds are cold
        cold=_cold(timing, engine, load, prompt, ranks) * max(1.0, engine.dp / load.concurrency),
        by_op=step.by_op,
        by_limit=step.by_limit,
        memory=free,
    )


def _decode_steps(load: Workload, engine: Engine, acceptance: float | Acceptance | None) -> float:
    """Decode steps of a request; the prefill gives the first token."""
    return (load.output - 1) / accepted(engine.drafts, acceptance)


def _cold(timing: Timing, engine: Engine, load: Workload, prompt: PromptTime, ranks: float) -> float:
    """Additional seconds of a prefill whose prefix is not cached yet."""
    if not load.prefix_hit:
        return 0.0
    return timing.prompt(engine, load.prompt, 0.0, ranks).alone - prompt.alone


def _burst(prompt: PromptTime, per_rank: float) -> float:
    """Mean wait of requests that arrive at once for the other prompts of their rank.

    The first request has a step for itself even where several would fit.
    """
    others = max(0.0, 1.0 - 1.0 / per_rank)
    return max(0.0, (per_rank - 1.0) / 2) * prompt.packed + (
        others * prompt.alone if prompt.packed < prompt.service else 0
    )


def _disaggregated(
    timing: Timing, layout: Layout, load: Workload, acceptance: float | Acceptance | None
) -> Prediction | None:
    """Solve prefill engines that feed a decode engine."""
    engine, prefill = layout.decode, layout.prefill
    assert prefill is not None
    model, hardware = timing.model, timing.hardware
    free = memory.fit(model, hardware, engine, decode_only=True, split=True)
    prefill_free = memory.fit(model, hardware, prefill, split=True)
    rank_capacity = memory.most_requests(free, engine, load)
    if rank_capacity <= 0 or memory.most_requests(prefill_free, prefill, load) <= 0:
        return None
    servers = prefill.dp * layout.prefill_engines / layout.replicas  # prefill ranks of one decode engine
    decode_steps = _decode_steps(load, engine, acceptance)
    context = load.prompt + load.output / 2
    ranks = max(1.0, min(float(prefill.dp), load.concurrency / layout.prefill_engines * layout.replicas))
    prompt = timing.prompt(prefill, load.fresh, load.prompt - load.fresh, ranks)
    transfer = _transfer_seconds(timing, engine, prefill, load)
    batches, seconds = timing.curve(engine, context)
    capacity = engine.dp * max(1.0, rank_capacity)
    rates = batches * engine.dp / np.maximum(decode_steps * seconds, 1e-9)  # requests per second by requests per rank

    def decode_seconds(rate: float) -> float:
        """Seconds of decode at the batch size at which `rate` requests start and end per second."""
        return decode_steps * float(np.interp(np.interp(rate, rates, batches), batches, seconds))

    def first_token(rate: float) -> float:
        """Seconds until the first token: wait for a free rank, prefill, transfer."""
        return prompt.alone + _queue_seconds(prompt, servers, rate) + transfer

    prefill_rate = servers / prompt.packed
    rate = bisect(lambda x: x * (first_token(x) + decode_seconds(x)) - load.concurrency, prefill_rate * 0.98)
    bound = "prefill" if rate > 0.9 * prefill_rate else "decode"
    if rate * decode_seconds(rate) > capacity:
        rate, bound = bisect(lambda x: x * decode_seconds(x) - capacity, rate), "memory"
    if load.rate is not None and load.rate < rate:
        rate, bound = load.rate, "arrivals"
    batch = max(1.0, min(capacity, rate * decode_seconds(rate)) / engine.dp)
    step = timing.near(engine, batch, context)
    stay, before = decode_steps * step.seconds, first_token(rate)
    wait = max(0.0, load.concurrency / rate - stay - before) if bound in ("memory", "prefill") else 0.0
    return Prediction(
        ttft=before + wait,
        tpot=stay / max(1.0, load.output - 1),
        output_per_second=layout.replicas * rate * load.output,
        running=layout.replicas * rate * (stay + before),
        limited_by=step.limit,
        bound=bound,
        residence=stay + before + wait,
        step_seconds=step.seconds,
        prefill_seconds=prompt.alone + transfer,
        burst=_burst(prompt, load.concurrency / servers) if bound != "prefill" else 0.0,
        cold=_cold(timing, prefill, load, prompt, ranks) * max(1.0, servers / load.concurrency),
        by_op=step.by_op,
        by_limit=step.by_limit,
        memory=free,
        prefill_memory=prefill_free,
    )


def _transfer_seconds(timing: Timing, engine: Engine, prefill: Engine, load: Workload) -> float:
    """Seconds to send the cache of a prompt from the prefill engine to the decode engine."""
    nbytes = load.prompt * cache.bytes_per_token(timing.model, engine.drafts > 0)
    return nbytes / (timing.hardware.link(engine.dies + prefill.dies).bandwidth * LINK) / prefill.tp


def _queue_seconds(prompt: PromptTime, servers: float, rate: float) -> float:
    """Mean wait for one of `servers` prefill ranks if `rate` prompts of one length arrive per second."""
    busy = min(0.98, rate * prompt.packed / servers)
    service = prompt.service + (prompt.packed - prompt.service) * busy
    return float(service * busy ** math.sqrt(2.0 * (servers + 1)) / (servers * (1.0 - busy)) / 2)
