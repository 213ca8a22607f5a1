"""Latency and throughput of a deployment under a load, and what limits them.

A closed system: `concurrency` requests are in it at all times. Their residence time gives the throughput, which gives
how many decode at once and how often a prefill slows them, and so the residence time; the rate is found by bisection.
A run of R requests by N clients is R / N residence times, after a first round to cold caches with all prompts at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from glm5_ascend.plan.inputs import Workload, tokens_per_step
from glm5_ascend.plan.layout import Engine, Layout
from glm5_ascend.plan.memory import End, Memory
from glm5_ascend.plan.steps import PromptTime, Steps

#: Shares of the time above which prefills are called the limit: of an engine that also decodes, of one that does not.
PREFILL_BOUND, PREFILL_ONLY_BOUND = 0.5, 0.9
#: Seconds of a request's way through the proxy to both engines, which each tokenize it. A guess: vllm-ascend 16984
#: saw 2.3 s for a cached prompt of 181k tokens, of which 0.4 to 0.9 s sent its cache.
HOP = 0.5
#: Largest busy shares of a rank that prefills, of decode steps, and of other servers: waits grow without end near 1.
MOST_BUSY, MOST_BLOCKED, MOST_BUSY_PREFILL = 0.999, 0.98, 1.0 - 1e-6


@dataclass(frozen=True)
class Prediction:
    """Figures of one layout under one load: output tokens per second of the whole deployment, mean seconds.

    Attributes:
        running: requests that decode or prefill at once. batch: those per rank, on `ranks` ranks, that decode.
        bound: limit of the throughput: decode | prefill | memory | seqs | arrivals.
        memory: of a die that decodes. hit: share of a prompt that is found in a cache, after the first requests.
    """

    tok_s: float
    ttft: float
    tpot: float
    running: float
    bound: str
    batch: float
    ranks: float
    memory: Memory
    hit: float = 0.0


class _Steady(NamedTuple):
    """Steady state of a decode engine and its prefill engines: requests per second; seconds until the first token and
    of the others; `batch` requests decode on each of `ranks` ranks, `servers` prefill, those of `blocking` slow all."""

    rate: float
    first: float
    decode: float
    bound: str
    batch: float
    ranks: float
    prompt: PromptTime
    servers: float
    blocking: float


def predict(
    steps: Steps, layout: Layout, workload: Workload, accepted: float | None = None, ends: Sequence[End] = ("value",)
) -> Prediction | None:
    """Figures of `layout` under the load (`accepted`: as in `tokens_per_step`); None if not one request fits at any of
    these ends of the memory's range: the first one at which one fits counts."""
    clients = min(workload.concurrency, float(workload.requests or math.inf)) / layout.replicas
    load = replace(
        workload, concurrency=clients, rate=workload.rate / layout.replicas if workload.rate else None,
        prefixes=workload.prefixes and math.ceil(workload.prefixes / layout.replicas),
    )  # fmt: skip
    if layout.decode.dcp > 1:
        load = replace(load, prefix_hit=0.0)  # hits disappear with DCP (vllm-ascend 13750)
    engine, prefill, prefills = layout.decode, layout.prefill, layout.prefills / layout.replicas
    free = steps.memory(engine, prefill is not None, prefill is not None)
    dies = [(free, engine), *([(steps.memory(prefill, False, True), prefill)] if prefill else [])]
    fitting = (end for end in ends if all(die.most_requests(owner, load, end) for die, owner in dies))
    end = next(fitting, None)
    if end is None:
        return None
    most = free.most_requests(engine, load, end)
    if load.hits == "device":
        running = min(most, clients / engine.dp) if prefill is None else 0.0
        resident = dies[-1][0].resident(load, running, end)
        load = replace(load, prefix_hit=load.prefix_hit * resident)
    passes = (load.output - 1) / tokens_per_step(engine.drafts, accepted)  # the prefill gives the first token
    if prefill:
        steady = _disaggregated(steps, engine, prefill, prefills, load, passes, most)
    else:
        steady = _mixed(steps, engine, load, passes, most)
    rate, stay, arrivals = steady.rate, steady.first + steady.decode, steady.bound == "arrivals"
    wait = 0.0 if arrivals else max(0.0, clients / rate - stay)  # until a request enters
    ttft = wait + steady.first
    if workload.requests is not None:
        cold = steps.prompt(prefill or engine, load.prompt, 0.0, 1.0).alone - steady.prompt.alone
        rate, ttft = _run(load, steady, wait, workload.requests / layout.replicas, cold)
    return Prediction(
        tok_s=layout.replicas * rate * workload.output, ttft=ttft,
        tpot=steady.decode / max(1.0, workload.output - 1), running=layout.replicas * steady.rate * stay,
        bound="seqs" if steady.bound == "memory" and most >= engine.sequences else steady.bound,
        batch=steady.batch, ranks=steady.ranks, memory=free, hit=load.prefix_hit,
    )  # fmt: skip


def _run(load: Workload, steady: _Steady, wait: float, requests: float, cold: float) -> tuple[float, float]:
    """(requests per second, mean TTFT) of a run of `requests` requests; cold: extra time of a prompt without hits."""
    clients, stay, prompt = load.concurrency, wait + steady.first + steady.decode, steady.prompt
    ttft, gap, burst = wait + steady.first, 1.0 / load.rate if load.rate else 0.0, 0.0
    queue = max(1.0, clients / steady.servers)
    if not load.rate:  # the prompts of the first round are sent all at once
        share = min(1.0, clients / requests)
        # A prompt waits for those of its rank before it, and all wait for the step that the first one has for itself.
        burst = (queue - 1.0) / 2 * prompt.packed + (1.0 - 1.0 / queue) * (prompt.alone - prompt.packed)
        ttft = share * (prompt.alone + burst + wait / 2) + (1.0 - share) * ttft
    seconds = max((requests - 1) * gap + stay, (clients - 1) * gap + requests / clients * stay) + burst
    if load.prefix_hit:
        cold *= 1.0 - load.warm
        # Cold prompts of a rank: each prefix, but a pool has those of all ranks.
        prefixes = load.different / (1.0 if load.hits == "device" else steady.servers)
        prefixes = max(1.0, min(prefixes, requests / steady.servers))
        # Those of the first round keep all behind them waiting; of few clients some are in later rounds.
        first, at_once = min(prefixes, queue), min(steady.servers, clients)
        later = max(0.0, min(steady.servers, requests) / max(1.0, clients) - 1.0)
        seconds += cold * prefixes * (1.0 + later * steady.blocking)
        waits = at_once * (first * (first + 1.0) / 2 + (queue - first) * first)
        ttft += cold * (waits + max(0.0, steady.servers * prefixes - at_once * first)) / requests
    return requests / seconds, ttft


def _mixed(steps: Steps, engine: Engine, load: Workload, passes: float, most: float) -> _Steady:
    clients = load.concurrency
    running = min(clients, most * engine.dp)
    ranks = min(float(engine.dp), max(1.0, running))
    batch, others = max(1.0, running / ranks), 1.0 - 1.0 / max(1.0, running)
    step = float(np.interp(batch, *steps.curve(engine, load.prompt + load.output / 2, ranks)))
    prompt = steps.hits(engine, load, load.prompt - load.fresh, 1.0)
    chunk = prompt.alone / prompt.chunks
    mixed_step = step * others * min(1.0, passes)  # decode work of other requests in the step of a chunk

    def times(rate: float) -> tuple[float, float]:
        """Seconds to the first token, and of the further tokens, if `rate` requests end per second."""
        # A prefilling rank slows all ranks: they meet at the experts in every layer, so a step lasts as long as its
        # chunk. Each rank prefills independently of the others. A request is not slowed by its own prefill.
        busy = min(MOST_BUSY, rate * prompt.alone / engine.pp / ranks)
        blocked = (1.0 - (1.0 - busy * others) ** ranks) * max(0.0, 1.0 - step / chunk)
        first = prompt.alone + prompt.chunks * mixed_step * (1.0 - busy) + mixed_step / 2
        first += prompt.alone * busy * busy / 2 / (1.0 - busy) * (1.0 - 1.0 / batch)  # other prompts of the rank
        return first, passes * step / (1.0 - min(MOST_BLOCKED, blocked))

    rate = _bisect(lambda x: x * sum(times(x)) - running, ranks / prompt.packed)
    bound = "decode" if running >= clients else "memory"
    if rate * prompt.packed / ranks > PREFILL_BOUND and bound == "decode":
        bound = "prefill"
    if load.rate is not None and load.rate < rate:
        rate, bound = load.rate, "arrivals"
    first, decode = times(rate)
    return _Steady(rate, first, decode, bound, batch, ranks, prompt, engine.dp, ranks)


def _disaggregated(
    steps: Steps, engine: Engine, prefill: Engine, prefills: float, load: Workload, passes: float, most: float
) -> _Steady:
    clients, servers = load.concurrency, prefill.dp * prefills
    ranks = min(float(engine.dp), max(1.0, clients))
    same_time = max(1.0, min(float(prefill.dp), clients / prefills))
    prompt = steps.hits(prefill, load, load.prompt - load.fresh, same_time)
    transfer = steps.transfer(engine, load.prompt)
    batches, seconds = steps.curve(engine, load.prompt + load.output / 2, ranks)
    # requests per second by requests per rank
    rates = [batch * ranks / max(passes * step, 1e-9) for batch, step in zip(batches, seconds, strict=True)]

    def decode(rate: float) -> float:
        """Seconds of decode at the batch size at which `rate` requests start and end per second."""
        return passes * float(np.interp(np.interp(rate, rates, batches), batches, seconds))

    def first(rate: float) -> float:
        """Seconds until the first token: prefill, transfer, waits for a rank that prefills and for room in one that
        decodes; there the request waits for the end of a step, and has one for itself."""
        busy = min(MOST_BUSY_PREFILL, rate * prompt.packed / servers)
        service = prompt.alone / prefill.pp * (1.0 - busy) + prompt.packed * busy
        hop = HOP + transfer + 1.5 * decode(rate) / max(1.0, passes)
        wait = _queue(decode(rate), rate * decode(rate) / capacity, capacity)
        return prompt.alone + _queue(service, busy, servers) + hop + wait

    most_rate, capacity = servers / prompt.packed, most * engine.dp
    rate, bound = _bisect(lambda x: x * (first(x) + decode(x)) - clients, most_rate), "decode"
    if rate > PREFILL_ONLY_BOUND * most_rate:
        bound = "prefill"
    elif rate * decode(rate) > PREFILL_ONLY_BOUND * capacity:
        bound = "memory"
    if load.rate is not None and load.rate < rate:
        rate, bound = load.rate, "arrivals"
    batch = max(1.0, min(capacity, rate * decode(rate)) / ranks)
    return _Steady(rate, first(rate), decode(rate), bound, batch, ranks, prompt, servers, 1.0)


def _queue(service: float, busy: float, servers: float) -> float:
    """Seconds that a request waits for one of `servers` servers, `busy` shares of the time (M/D/c, Sakasegawa)."""
    busy = min(MOST_BUSY_PREFILL, busy)
    return service * math.pow(busy, math.sqrt(2 * (servers + 1))) / servers / (1.0 - busy) / 2


def _bisect(excess: Callable[[float], float], high: float) -> float:
    """The rate in (0, high] at which `excess` (growing in it) turns positive."""
    if excess(high) <= 0:
        return high
    low = 0.0
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if excess(middle) > 0 else (middle, high)
    return (low + high) / 2
