"""A slow reference of plan/simulate.py: every step, and every draft accepted or rejected at random.

The two share only the cost of a step.
"""

from __future__ import annotations

import numpy as np

from glm5_ascend.plan.simulate import (
    Costs,
    Outcome,
    Trace,
    cache_tokens,
    chunk_seconds,
    compiled,
    compiled_arguments,
    step_seconds,
)


def simulate_steps(costs: Costs, trace: Trace, closed: int = 0, seed: int = 0) -> Outcome:
    """Run the trace on one engine, step by step; arguments as in `simulate`."""
    queue, engine = compiled_arguments(costs, trace)
    first, done = _stepwise(queue, engine, np.array(costs.chances), closed, seed)
    return Outcome(queue.arrival, first, done, trace.output)


WAITING, PREFILLING, DECODING, FINISHED = 0, 1, 2, 3


@compiled
def _admit(queue, engine, state, came):  # type: ignore[no-untyped-def]
    """Start waiting requests that fit; returns the number of running requests."""
    running, lanes, cached = 0, 0, 0
    for i in range(came):
        if state[i] == PREFILLING or state[i] == DECODING:
            running += 1
            lanes += state[i] == PREFILLING
            cached += cache_tokens(queue, i)
    for i in range(came):
        if state[i] == WAITING:
            need, prefills = cache_tokens(queue, i), queue.fresh[i] > 0
            if running >= engine.slots * engine.ranks or (
                cached + need > engine.capacity * engine.ranks and cached > 0
            ):
                break
            if prefills and lanes == engine.ranks:
                break
            state[i] = PREFILLING if prefills else DECODING
            lanes += prefills
            running += 1
            cached += need
    return running


@compiled
def _tokens(chances):  # type: ignore[no-untyped-def]
    """Tokens of a request in one step: one, and the drafts before the first rejected one."""
    tokens = 1
    for chance in chances:
        if np.random.random() >= chance:
            break
        tokens += 1
    return tokens


@compiled
def _stepwise(queue, engine, chances, closed, seed):  # type: ignore[no-untyped-def]
    np.random.seed(seed)
    arrival, n = queue.arrival, len(queue.fresh)
    first, done, state = np.full(n, -1.0), np.zeros(n), np.zeros(n, np.int8)
    left, start, missing = queue.fresh.astype(np.float64), queue.cached.astype(np.float64), queue.output.copy()
    came, finished, now = (min(closed, n) if closed else 0), 0, 0.0
    arrival[:came] = 0.0
    while finished < n:
        while not closed and came < n and arrival[came] <= now:
            came += 1
        if _admit(queue, engine, state, came) == 0:
            now = arrival[came]
            continue
        decoding, longest = 0, 0.0
        for i in range(came):
            if state[i] == DECODING:
                if first[i] < 0:  # the prompt was cached: the first token is there
                    first[i] = now
                    missing[i] -= 1
                decoding += 1
            elif state[i] == PREFILLING:
                longest = max(longest, chunk_seconds(engine.prefill, min(left[i], engine.chunk), start[i]))
        now += longest + (step_seconds(engine.step, decoding / engine.ranks) if decoding else 0.0)
        newly = 0
        for i in range(came):
            if state[i] == DECODING:
                missing[i] -= _tokens(chances)
            elif state[i] == PREFILLING:
                size = min(left[i], engine.chunk)
                left[i] -= size
                start[i] += size
                if left[i] > 0:
                    continue
                state[i], first[i] = DECODING, now
                missing[i] -= 1
            else:
                continue
            if missing[i] <= 0:
                state[i], done[i] = FINISHED, now
                newly += 1
        finished += newly
        while closed and newly > 0 and came < n:
            arrival[came] = now
            came, newly = came + 1, newly - 1
    return first, done
