"""Steady state of a deployment: latency, throughput, and what limits them.

A closed system: `concurrency` requests are in it at all times. Their residence time fixes the throughput, the
throughput fixes how many of them decode at once and how often a prefill holds them up, and that fixes the residence
time: one unknown, found by bisection.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from glm5_ascend.plan import cache, memory
from glm5_ascend.plan.efficiency import Efficiencies
from glm5_ascend.plan.hardware import Hardware
from glm5_ascend.plan.layout import Engine, Layout
from glm5_ascend.plan.memory import Memory
from glm5_ascend.plan.model import PlannedModel
from glm5_ascend.plan.roofline import LINK, decode_step, prefill_chunk
from glm5_ascend.plan.workload import Workload, accepted


@dataclass(frozen=True)
class Prediction:
    """Of one layout under one workload; seconds, tokens per second of the whole deployment.

    Attributes:
        running: requests that decode or prefill at once; the others wait.
        residence: seconds a request is one of them.
        limited_by: what the time of a decode step is mostly spent on.
        bound: what stops throughput from growing: decode | prefill | memory | arrivals.
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
    return load.requests * load.output / seconds


def prefill_seconds(
    model: PlannedModel, hardware: Hardware, engine: Engine, efficiency: Efficiencies, workload: Workload, ranks: float
) -> float:
    """A prompt's prefill in chunks, on an engine of which so many ranks prefill at once."""
    fresh, done = workload.fresh, workload.prompt - workload.fresh
    chunks = math.ceil(fresh / engine.batched_tokens)
    size = fresh / chunks
    # Time is linear in where a chunk starts but for the few tokens before index_topk: the middle stands for all.
    if chunks > 4:
        middle = prefill_chunk(model, hardware, engine, efficiency, size, done + fresh / 2 - size / 2, ranks)
        return chunks * middle.seconds
    starts = (done + size * i for i in range(chunks))
    return sum(prefill_chunk(model, hardware, engine, efficiency, size, s, ranks).seconds for s in starts)


def predict(
    model: PlannedModel,
    hardware: Hardware,
    layout: Layout,
    efficiency: Efficiencies,
    workload: Workload,
    acceptance: float | None = None,
) -> Prediction | None:
    """Steady state of one replica of `layout` under its share of the workload; None if not one request fits."""
    n = layout.replicas
    share = Workload(
        workload.prompt, workload.output, workload.concurrency / n, workload.prefix_hit,
        workload.rate / n if workload.rate else None,
    )  # fmt: skip
    solve = _together if layout.prefill is None else _apart
    return solve(model, hardware, layout, efficiency, share, acceptance)


def _together(
    model: PlannedModel, hardware: Hardware, layout: Layout, efficiency: Efficiencies, load: Workload,
    acceptance: float | None,
) -> Prediction | None:  # fmt: skip
    engine = layout.decode
    held = memory.fit(model, hardware, engine)
    room = most_requests(held, engine, load)
    if room < 1:
        return None
    running = min(load.concurrency, room * engine.dp)
    steps = (load.output - 1) / accepted(engine.drafts, acceptance)  # the first token comes from the prefill
    per_rank = max(1.0, running / engine.dp)
    context = load.prompt + load.output / 2
    step = decode_step(model, hardware, engine, efficiency, per_rank, context)
    ranks = min(float(engine.dp), running)
    alone = prefill_seconds(model, hardware, engine, efficiency, load, 1.0)
    crowded = prefill_seconds(model, hardware, engine, efficiency, load, ranks)

    def residence(rate: float) -> tuple[float, float]:
        """(seconds a request stays, seconds a prefill takes) if `rate` requests end per second."""
        # A prefilling rank holds up all: they meet at the experts in every layer. Ranks prefill independently, so
        # the share of time in which any does is less than the sum.
        one = alone
        for _ in range(3):
            busy = min(0.999, rate * one / ranks)
            some = 1.0 - (1.0 - busy) ** ranks
            together = busy * ranks / max(some, 1e-9)
            one = alone + (crowded - alone) * (together - 1.0) / max(ranks - 1.0, 1e-9)
        return one + steps * step.seconds / (1.0 - min(0.98, some)), one

    rate = _bisect(lambda x: x * residence(x)[0] - running, ranks / crowded)
    bound = "decode" if running >= load.concurrency else "memory"
    if load.rate is not None and load.rate < rate:
        rate, bound = load.rate, "arrivals"
    stay, one = residence(rate)
    wait = max(0.0, load.concurrency / rate - stay) if bound == "memory" else 0.0
    if bound != "memory" and one * rate / ranks > 0.5:
        bound = "prefill"
    return Prediction(
        one + wait, (stay - one) / max(1.0, load.output - 1), layout.replicas * rate * load.output,
        layout.replicas * rate * stay, step.limit, bound, stay, step.seconds, one, step.by_op, step.by_limit, held,
    )  # fmt: skip


def _apart(
    model: PlannedModel, hardware: Hardware, layout: Layout, efficiency: Efficiencies, load: Workload,
    acceptance: float | None,
) -> Prediction | None:  # fmt: skip
    engine, first = layout.decode, layout.prefill
    assert first is not None
    held = memory.fit(model, hardware, engine, decode_only=True, split=True)
    ahead = memory.fit(model, hardware, first, split=True)
    room = most_requests(held, engine, load)
    if room < 1 or most_requests(ahead, first, load) < 1:
        return None
    steps = (load.output - 1) / accepted(engine.drafts, acceptance)  # the first token comes from the prefill
    context = load.prompt + load.output / 2
    one = prefill_seconds(model, hardware, first, efficiency, load, float(first.dp))
    moved = load.prompt * cache.bytes_per_token(model, engine.drafts > 0)
    transfer = moved / (hardware.link(layout.decode.dies + first.dies).bandwidth * LINK) / first.tp

    batches = np.geomspace(1.0, max(2.0, float(engine.sequences)), 9)
    known = [steps * decode_step(model, hardware, engine, efficiency, float(n), context).seconds for n in batches]

    def decoding(rate: float) -> float:
        """Seconds of decode if `rate` requests end per second: the fixed point of batch and step."""
        low, high = 1.0, float(batches[-1])
        for _ in range(30):
            batch = (low + high) / 2
            low, high = (batch, high) if rate * np.interp(batch, batches, known) / engine.dp > batch else (low, batch)
        return float(np.interp((low + high) / 2, batches, known))

    def before(rate: float) -> float:
        """Seconds until the first token: waiting for a rank that is not busy, prefill, transfer."""
        busy = min(0.98, rate * one / first.dp)
        wait: float = (
            one * busy ** math.sqrt(2.0 * (first.dp + 1)) / (first.dp * (1.0 - busy)) / 2
        )  # fixed service time
        return one + wait + transfer

    most_decoding = engine.dp * min(room, float(engine.sequences))
    rate = _bisect(lambda x: x * (before(x) + decoding(x)) - load.concurrency, first.dp / one * 0.98)
    bound = "prefill" if rate > 0.9 * first.dp / one else "decode"
    if rate * decoding(rate) > most_decoding:
        rate, bound = _bisect(lambda x: x * decoding(x) - most_decoding, rate), "memory"
    if load.rate is not None and load.rate < rate:
        rate, bound = load.rate, "arrivals"
    batch = min(most_decoding, rate * decoding(rate)) / engine.dp
    step = decode_step(model, hardware, engine, efficiency, max(1.0, batch), context)
    stay = steps * step.seconds
    wait = max(0.0, load.concurrency / rate - stay - before(rate)) if bound == "memory" else 0.0
    return Prediction(
        before(rate) + wait, stay / max(1.0, load.output - 1), layout.replicas * rate * load.output,
        layout.replicas * rate * (stay + before(rate)), step.limit, bound, stay + before(rate), step.seconds, one,
        step.by_op, step.by_limit, held, ahead,
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
