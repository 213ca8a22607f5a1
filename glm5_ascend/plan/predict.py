"""Steady state of a deployment: latency, throughput, and what limits them.

A closed system: `concurrency` requests are in it at all times. Their residence time fixes the throughput, the
throughput fixes how many of them decode at once and how often a prefill holds them up, and that fixes the residence
time: one unknown, found by bisection.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from glm5_ascend.plan import cache, memory
from glm5_ascend.plan.efficiency import Efficiencies
from glm5_ascend.plan.hardware import Hardware
from glm5_ascend.plan.layout import Engine, Layout
from glm5_ascend.plan.memory import Memory
from glm5_ascend.plan.model import PlannedModel
from glm5_ascend.plan.roofline import LINK
from glm5_ascend.plan.timing import PromptTime, Timing
from glm5_ascend.plan.workload import Acceptance, Workload, accepted

#: Of a run whose requests are all alike and begin together: how much of their prefills falls together on all ranks, on
#: a logarithmic scale of ranks. Chosen by the public runs; simulated, lengths that differ by 2 to 10 % do as much.
ALIGNED = 0.5


@dataclass(frozen=True)
class Prediction:
    """Of one layout under one workload; seconds, tokens per second of the whole deployment.

    Attributes:
        running: requests that decode or prefill at once; the others wait.
        residence: seconds a request is one of them.
        limited_by: what the time of a decode step is mostly spent on.
        bound: what stops throughput from growing: decode | prefill | memory | arrivals.
        burst: seconds of the mean first token that a run's first requests wait more, all sent at once.
        cold: seconds they wait for the shared prefix, if it is not cached yet.
        by_op: seconds of a decode step by operator.
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


def most_requests(held: Memory, engine: Engine, workload: Workload) -> float:
    """Requests of one rank that fit: by its cache, with the shared prefix once, and by --max-num-seqs.

    Not whole: requests come and go, and on the mean are only half through their output.
    """
    shared = cache.pages(workload.prompt * workload.prefix_hit) if workload.prefix_hit else 0
    own = cache.pages(workload.prompt - shared) + workload.output / 2 + cache.PAGE / 2
    room = held.tokens() - shared
    if room < cache.pages(workload.prompt + workload.output - shared):
        return 0.0  # not one whole request
    return max(0.0, min(float(engine.sequences), room / own))


def run_output(found: Prediction, load: Workload) -> float:
    """Output tokens per second of a run of `load.requests`: it ends when the last of them has its answer."""
    if load.requests is None:
        return found.output_per_second
    if found.bound == "memory":
        seconds = load.requests / found.running * found.residence
    else:
        # Request i starts when it is sent, and not before the one `concurrency` places ahead has ended.
        rounds, last = divmod(load.requests - 1, load.concurrency)
        gap = 1.0 / load.rate if load.rate else 0.0
        seconds = max((load.requests - 1) * gap, last * gap + rounds * found.residence) + found.residence
    if not load.rate and load.concurrency > 1:
        seconds += found.burst  # the first round's prompts come all at once, later ones one after the other
    if not load.warm:
        seconds += found.cold
    return load.requests * load.output / seconds


def run_ttft(found: Prediction, load: Workload) -> float:
    """Mean seconds to the first token in a run of `load.requests`."""
    if load.requests is None or load.rate:
        return found.ttft
    first = found.prefill_seconds + found.burst + (0.0 if load.warm else found.cold)
    share = min(1.0, load.concurrency / load.requests)  # of the requests that come together at the start
    return share * first + (1.0 - share) * found.ttft


def predict(
    model: PlannedModel,
    hardware: Hardware,
    layout: Layout,
    efficiency: Efficiencies,
    workload: Workload,
    acceptance: float | Acceptance | None = None,
    timing: Timing | None = None,
) -> Prediction | None:
    """Steady state of one replica of `layout` under its share of the workload; None if not one request fits."""
    n, clients = layout.replicas, workload.concurrency
    if workload.requests is not None:
        clients = min(clients, float(workload.requests))
    share = Workload(
        workload.prompt, workload.output, clients / n, workload.prefix_hit,
        workload.rate / n if workload.rate else None, workload.requests,
    )  # fmt: skip
    if layout.decode.dcp > 1:
        share = replace(share, prefix_hit=0.0)  # hits disappear with DCP (vllm-ascend 13750)
    solve = _together if layout.prefill is None else _apart
    return solve(timing or Timing(model, hardware, efficiency), layout, share, acceptance)


def _together(
    timing: Timing, layout: Layout, load: Workload, acceptance: float | Acceptance | None
) -> Prediction | None:
    engine = layout.decode
    held = memory.fit(timing.model, timing.hardware, engine)
    room = most_requests(held, engine, load)
    if room <= 0:
        return None
    running = min(load.concurrency, max(1.0, room) * engine.dp)
    steps = (load.output - 1) / accepted(engine.drafts, acceptance)  # the first token comes from the prefill
    per_rank = max(1.0, running / engine.dp)
    context = load.prompt + load.output / 2
    shown = timing.step(engine, per_rank, context)
    step = shown.seconds
    ranks = min(float(engine.dp), max(1.0, running))
    done = load.prompt - load.fresh
    alone = timing.prompt(engine, load.fresh, done, 1.0)
    crowded = timing.prompt(engine, load.fresh, done, ranks)
    cold = timing.prompt(engine, load.prompt, 0.0, ranks).alone - crowded.alone if load.prefix_hit else 0.0
    cold *= max(1.0, engine.dp / load.concurrency)  # few clients reach idle ranks in turn: several rounds are cold
    aligned = 0.0 if load.requests is None else ALIGNED
    beside = step if running > 1 and load.output > 1 else 0.0  # a chunk shares its step with those that decode

    def residence(rate: float) -> tuple[float, float, float]:
        """(seconds a request stays, until its first token, of a prefill) if `rate` requests end per second."""
        # A prefilling rank holds up all: they meet at the experts in every layer. Ranks prefill independently, so
        # the share of time in which any does is less than the sum; a request is not held up by its own.
        one = crowded.alone
        busy = min(0.999, rate * one / engine.pp / ranks)
        others = busy * (1.0 - 1.0 / max(1.0, running))
        some = 1.0 - (1.0 - others) ** (ranks ** (1.0 - aligned))
        first = one + alone.chunks * beside * (1.0 - busy) + beside / 2
        if per_rank > 1:  # others of its rank whose prompt is not yet read; clients that wait in turn meet rarely
            first += one * busy * busy / 2 / (1.0 - busy) * (1.0 - 1.0 / per_rank)
        return first + steps * step / (1.0 - min(0.98, some)), first, one

    rate = _bisect(lambda x: x * residence(x)[0] - running, ranks / crowded.service)
    bound = "decode" if running >= load.concurrency else "memory"
    if load.rate is not None and load.rate < rate:
        rate, bound = load.rate, "arrivals"
    stay, first, one = residence(rate)
    wait = max(0.0, load.concurrency / rate - stay) if bound == "memory" else 0.0
    if bound != "memory" and one * rate / ranks > 0.5:
        bound = "prefill"
    return Prediction(
        first + wait, (stay - first) / max(1.0, load.output - 1), layout.replicas * rate * load.output,
        layout.replicas * rate * stay, shown.limit, bound, stay, shown.seconds, one,
        _burst(crowded, per_rank), cold, shown.by_op, shown.by_limit, held,
    )  # fmt: skip


def _burst(prompt: PromptTime, per_rank: float) -> float:
    """Mean wait of requests that come all at once, behind those of their rank.

    The first has a step for itself even where several would fit.
    """
    others = max(0.0, 1.0 - 1.0 / per_rank)
    return max(0.0, (per_rank - 1.0) / 2) * prompt.tight + (
        others * prompt.alone if prompt.tight < prompt.service else 0
    )


def _apart(timing: Timing, layout: Layout, load: Workload, acceptance: float | Acceptance | None) -> Prediction | None:
    engine, first = layout.decode, layout.prefill
    assert first is not None
    model, hardware = timing.model, timing.hardware
    held = memory.fit(model, hardware, engine, decode_only=True, split=True)
    ahead = memory.fit(model, hardware, first, split=True)
    room = most_requests(held, engine, load)
    if room <= 0 or most_requests(ahead, first, load) <= 0:
        return None
    servers = first.dp * layout.prefill_engines / layout.replicas  # ranks that prefill for one decode engine
    steps = (load.output - 1) / accepted(engine.drafts, acceptance)  # the first token comes from the prefill
    context = load.prompt + load.output / 2
    crowd = max(1.0, min(float(first.dp), load.concurrency / layout.prefill_engines * layout.replicas))
    one = timing.prompt(first, load.fresh, load.prompt - load.fresh, crowd)
    cold = timing.prompt(first, load.prompt, 0.0, crowd).alone - one.alone if load.prefix_hit else 0.0
    cold *= max(1.0, servers / load.concurrency)
    moved = load.prompt * cache.bytes_per_token(model, engine.drafts > 0)
    transfer = moved / (hardware.link(engine.dies + first.dies).bandwidth * LINK) / first.tp
    batches, seconds = timing.curve(engine, context)
    most = engine.dp * max(1.0, room)

    rates = batches * engine.dp / np.maximum(steps * seconds, 1e-9)  # requests per second of so many per rank

    def decoding(rate: float) -> float:
        """Seconds of decode if `rate` requests end per second: the batch at which as many come as end."""
        return steps * float(np.interp(np.interp(rate, rates, batches), batches, seconds))

    def before(rate: float) -> float:
        """Seconds until the first token: waiting for a rank that is not busy, prefill, transfer."""
        busy = min(0.98, rate * one.tight / servers)
        service = one.service + (one.tight - one.service) * busy
        wait: float = service * busy ** math.sqrt(2.0 * (servers + 1)) / (servers * (1.0 - busy)) / 2  # fixed lengths
        return one.alone + wait + transfer

    fastest = servers / one.tight
    rate = _bisect(lambda x: x * (before(x) + decoding(x)) - load.concurrency, fastest * 0.98)
    bound = "prefill" if rate > 0.9 * fastest else "decode"
    if rate * decoding(rate) > most:
        rate, bound = _bisect(lambda x: x * decoding(x) - most, rate), "memory"
    if load.rate is not None and load.rate < rate:
        rate, bound = load.rate, "arrivals"
    batch = max(1.0, min(most, rate * decoding(rate)) / engine.dp)
    shown = timing.near(engine, batch, context)
    stay = steps * shown.seconds
    wait = max(0.0, load.concurrency / rate - stay - before(rate)) if bound in ("memory", "prefill") else 0.0
    burst = _burst(one, load.concurrency / servers) if bound != "prefill" else 0.0
    return Prediction(
        before(rate) + wait, stay / max(1.0, load.output - 1), layout.replicas * rate * load.output,
        layout.replicas * rate * (stay + before(rate)), shown.limit, bound, stay + before(rate) + wait,
        shown.seconds, one.alone + transfer, burst, cold, shown.by_op, shown.by_limit, held, ahead,
    )  # fmt: skip


def _bisect(excess: Callable[[float], float], high: float) -> float:
    """The rate in (0, high] at which `excess` (growing in it) turns positive."""
    low = 0.0
    if excess(high) <= 0:
        return high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if excess(middle) > 0 else (middle, high)
        if high - low < 1e-4 * high:
            break
    return (low + high) / 2
