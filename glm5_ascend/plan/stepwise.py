"""The scheduler of simulate.py, every step on its own and every draft accepted or refused by chance.

Slow and simple: what the aggregated simulation is checked against. It shares the cost of a step with it, nothing else.
"""

from __future__ import annotations

import numpy as np

from glm5_ascend.plan.costs import Costs
from glm5_ascend.plan.simulate import Outcome, Trace, chunk_seconds, compiled, compiled_arguments, step_seconds


def simulate_steps(costs: Costs, trace: Trace, closed: int = 0, seed: int = 0) -> Outcome:
    """The same, every step on its own and every draft accepted or refused by chance: slow, for small traces."""
    queue, engine = compiled_arguments(costs, trace)
    first, done = _stepwise(queue, engine, np.array(costs.chances), closed, seed)
    return Outcome(queue.arrival, first, done, trace.output)


WAITING, PREFILLING, DECODING, FINISHED = 0, 1, 2, 3


@compiled
def _held(queue, i):  # type: ignore[no-untyped-def]
    """Cached tokens of request i, in whole pages."""
    return 128 * ((queue.fresh[i] + queue.cached[i] + queue.output[i] + 127) // 128)


@compiled
def _let_in(queue, engine, state, came):  # type: ignore[no-untyped-def]
    """Those that came and fit begin to prefill, or to decode if their prompt is cached; returns how many are inside."""
    inside, lanes, held = 0, 0, 0
    for i in range(came):
        if state[i] == PREFILLING or state[i] == DECODING:
            inside += 1
            lanes += state[i] == PREFILLING
            held += _held(queue, i)
    for i in range(came):
        if state[i] == WAITING:
            need, prefills = _held(queue, i), queue.fresh[i] > 0
            if inside >= engine.slots * engine.ranks or (held + need > engine.room * engine.ranks and held > 0):
                break
            if prefills and lanes == engine.ranks:
                break
            state[i] = PREFILLING if prefills else DECODING
            lanes += prefills
            inside += 1
            held += need
    return inside


@compiled
def _tokens(chances):  # type: ignore[no-untyped-def]
    """Tokens of a request in one step: one, and the drafts before the first refused one."""
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
        if _let_in(queue, engine, state, came) == 0:
            now = arrival[came]
            continue
        decoding, longest = 0, 0.0
        for i in range(came):
            if state[i] == DECODING:
                if first[i] < 0:  # its prompt was cached whole: the token after it is there
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
