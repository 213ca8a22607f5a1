"""A discrete-event simulation of the scheduler: continuous batching, chunked prefill, prefix cache, PD.

Requests wait in one queue. A rank with a free slot and enough cache takes the first one, prefills it in chunks while
the others decode, and decodes it. All ranks step together (their tokens meet at the experts). Between two events only
the numbers of tokens change, so these steps are taken at once: the work grows with requests, not with tokens. A test
compares this with a simulation of every step and every token.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from glm5_kernels.registry import cache

#: Decorator of compiled functions; numba raises if it cannot write its cache.
compiled = njit(cache=cache.prepare() is not None)
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Costs:
    """Cost tables of one engine.

    Attributes:
        ranks: DP ranks, each of which prefills one prompt at a time.
        slots: maximum requests of a rank. capacity: cached tokens of a rank.
        chunk: tokens of a prefill chunk.
        gain: mean tokens that a decoding request gains per step.
        step: seconds of a decode step with 0, 1, 2, ... requests per rank (linear between).
        prefill: seconds of a chunk = [0] + [1] x its tokens + [2] x its tokens x their mean context.
        chances: probability that a draft is accepted, given that those before it were.
    """

    ranks: int
    slots: int
    capacity: int
    chunk: int
    gain: float
    step: Floats
    prefill: tuple[float, float, float]
    chances: tuple[float, ...]


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival (seconds), with tokens to prefill, tokens already cached, and output tokens."""

    arrival: Floats
    fresh: Ints
    cached: Ints
    output: Ints


@dataclass(frozen=True)
class Outcome:
    """Times (seconds) of arrival, first token and end of each request, and its output tokens."""

    arrival: Floats
    first: Floats
    done: Floats
    output: Ints

    def summary(self) -> dict[str, float]:
        """Tokens per second from the first arrival to the last end; means and tails of latency in seconds."""
        ttft = self.first - self.arrival
        tpot = (self.done - self.first) / np.maximum(1, self.output - 1)
        values = {
            "output_tokens_per_s": float(self.output.sum() / (self.done.max() - self.arrival.min())),
            "ttft_mean": float(ttft.mean()),
            "tpot_mean": float(tpot.mean()),
        }
        for share in (50, 90, 99):
            values[f"ttft_p{share}"] = float(np.percentile(ttft, share))
            values[f"tpot_p{share}"] = float(np.percentile(tpot, share))
        return values


def simulate(costs: Costs, trace: Trace, closed: int = 0) -> Outcome:
    """Run the trace on one engine.

    Args:
        closed: number of clients that each wait for their answer, arrival times are then ignored; 0: open.
    """
    queue, engine = compiled_arguments(costs, trace)
    first, done = _aggregated(queue, engine, costs.gain, closed)
    return Outcome(queue.arrival, first, done, trace.output)


def simulate_disaggregated(prefill: Costs, decode: Costs, trace: Trace, transfer: float) -> Outcome:
    """Run the trace with prefill on one engine, `transfer` seconds for the cache, and decode on another engine."""
    one_token = np.ones_like(trace.output)
    prefilled = simulate(prefill, Trace(trace.arrival, trace.fresh, trace.cached, one_token))
    ready = prefilled.first + transfer
    order = np.argsort(ready, kind="stable")
    prompt = trace.fresh + trace.cached
    decoded = simulate(decode, Trace(ready[order], np.zeros_like(prompt), prompt[order], trace.output[order]))
    done = np.empty_like(ready)
    done[order] = decoded.done
    return Outcome(trace.arrival, ready, done, trace.output)


def compile_all() -> None:
    """Compile `simulate` with a trace of one request; for `warm-up`."""
    one = np.ones(1, np.int64)
    step = np.array([0.0, 0.01])
    simulate(Costs(1, 1, 1024, 1024, 1.0, step, (0.0, 1e-3, 0.0), ()), Trace(np.zeros(1), one, one, one + 1))


class Queue(NamedTuple):
    """Requests of a trace, for compiled code: [requests] each."""

    arrival: Floats
    fresh: Ints
    cached: Ints
    output: Ints


class EngineTable(NamedTuple):
    """Fields of `Costs`, for compiled code."""

    ranks: int
    slots: int
    capacity: int
    chunk: int
    step: Floats
    prefill: Floats


class PrefillLanes(NamedTuple):
    """Prefill of each rank, [ranks] each: index of the request or -1, tokens left, position of the next token."""

    request: Ints
    left: Floats
    start: Floats


def compiled_arguments(costs: Costs, trace: Trace) -> tuple[Queue, EngineTable]:
    """Arguments of compiled simulations, which write arrival times of closed clients."""
    queue = Queue(trace.arrival.copy(), trace.fresh, trace.cached, trace.output)
    return queue, EngineTable(
        costs.ranks, costs.slots, costs.capacity, costs.chunk, costs.step, np.array(costs.prefill)
    )


@compiled  # type: ignore[untyped-decorator]
def step_seconds(table: Floats, per_rank: float) -> float:
    low = int(per_rank)
    if low + 1 >= len(table):
        return float(table[-1])
    return float(table[low] + (per_rank - low) * (table[low + 1] - table[low]))


@compiled  # type: ignore[untyped-decorator]
def chunk_seconds(prefill: Floats, size: float, start: float) -> float:
    return float(prefill[0] + prefill[1] * size + prefill[2] * size * (start + size / 2))


@compiled
def cache_tokens(queue, i):  # type: ignore[no-untyped-def]
    """Cached tokens of request i, in whole pages."""
    return 128 * ((queue.fresh[i] + queue.cached[i] + queue.output[i] + 127) // 128)


@compiled
def _enter(lanes, queue, i):  # type: ignore[no-untyped-def]
    """Request i takes the first free rank."""
    lane = 0
    while lanes.request[lane] >= 0:
        lane += 1
    lanes.request[lane], lanes.left[lane], lanes.start[lane] = i, queue.fresh[i], queue.cached[i]


@compiled
def _prefill_chunks(lanes, engine):  # type: ignore[no-untyped-def]
    """A chunk on every rank that prefills; returns the longest one's seconds."""
    longest = 0.0
    for lane in range(engine.ranks):
        if lanes.request[lane] >= 0:
            size = min(lanes.left[lane], engine.chunk)
            longest = max(longest, chunk_seconds(engine.prefill, size, lanes.start[lane]))
            lanes.left[lane] -= size
            lanes.start[lane] += size
    return longest


@compiled
def _aggregated(queue, engine, gain, closed):  # type: ignore[no-untyped-def]
    arrival, n, ranks = queue.arrival, len(queue.fresh), engine.ranks
    first, done = np.zeros(n), np.zeros(n)
    lanes = PrefillLanes(np.full(ranks, -1), np.zeros(ranks), np.zeros(ranks))
    running = [(0.0, 0)]
    running.pop()
    came, taken, finished, busy = (min(closed, n) if closed else 0), 0, 0, 0
    arrival[:came] = 0.0
    now, gained, cached = 0.0, 0.0, 0
    while finished < n:
        if not closed:
            while came < n and arrival[came] <= now:
                came += 1
            if taken == came and busy == 0 and len(running) == 0:
                now = arrival[came]
                continue
        # the next request that fits gets a rank; a completely cached prompt (PD) decodes at once
        while taken < came and len(running) + busy < engine.slots * ranks:
            need = cache_tokens(queue, taken)
            if (cached + need > engine.capacity * ranks and cached > 0) or (queue.fresh[taken] > 0 and busy == ranks):
                break
            if queue.fresh[taken] == 0:
                first[taken] = now
                heapq.heappush(running, (gained + queue.output[taken] - 1, taken))
            else:
                _enter(lanes, queue, taken)
                busy += 1
            cached += need
            taken += 1
        seconds = step_seconds(engine.step, len(running) / ranks) if len(running) else 0.0
        if busy:
            now += seconds + _prefill_chunks(lanes, engine)
            if len(running):
                gained += gain
        else:
            count = max(1.0, np.ceil((running[0][0] - gained) / gain - 1e-9))
            if not closed and came < n and taken == came:  # a later request may enter between
                count = min(count, max(1.0, np.ceil((arrival[came] - now) / seconds)))
            now += count * seconds
            gained += count * gain
        for lane in range(ranks):
            i = lanes.request[lane]
            if i >= 0 and lanes.left[lane] <= 0:
                first[i] = now
                heapq.heappush(running, (gained + queue.output[i] - 1, i))
                lanes.request[lane] = -1
                busy -= 1
        while len(running) and running[0][0] <= gained + 1e-9:
            i = heapq.heappop(running)[1]
            done[i] = now
            finished += 1
            cached -= cache_tokens(queue, i)
            if closed and came < n:
                arrival[came] = now
                came += 1
    return first, done
