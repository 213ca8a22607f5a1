"""The scheduler of simulate.py, every step on its own and every draft accepted or refused by chance.

Slow and simple: what the aggregated simulation is checked against. It shares the cost of a step with it, nothing else.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from glm5_ascend.plan.costs import Costs
from glm5_ascend.plan.simulate import Outcome, Trace, step_seconds


def simulate_steps(costs: Costs, trace: Trace, closed: int = 0, seed: int = 0) -> Outcome:
    """The same, every step on its own and every draft accepted or refused by chance: slow, for small traces."""
    arrival, first, done = _stepwise(
        trace.arrival.copy(), trace.fresh, trace.cached, trace.output, costs.ranks, costs.slots, costs.room,
        costs.chunk, np.array(costs.chances), costs.step, np.array(costs.prefill), closed, seed,
    )  # fmt: skip
    return Outcome(arrival, first, done, trace.output)


@njit(cache=True)
def _stepwise(arrival, fresh, cached, output, ranks, slots, room, chunk, chances, step, prefill, closed, seed):  # type: ignore[no-untyped-def]
    np.random.seed(seed)
    n = len(fresh)
    first, done = np.zeros(n), np.zeros(n)
    state = np.zeros(n, np.int8)  # 0 waiting, 1 prefilling, 2 decoding, 3 finished
    left, start, missing = fresh.astype(np.float64), cached.astype(np.float64), output.copy()
    came, finished, now = (min(closed, n) if closed else 0), 0, 0.0
    if closed:
        arrival[:came] = 0.0
    while finished < n:
        if not closed:
            while came < n and arrival[came] <= now:
                came += 1
        inside, lanes, held = 0, 0, 0
        for i in range(came):
            if state[i] == 1 or state[i] == 2:
                inside += 1
                lanes += state[i] == 1
                held += 128 * ((fresh[i] + cached[i] + output[i] + 127) // 128)
        for i in range(came):
            if state[i] == 0:
                need = 128 * ((fresh[i] + cached[i] + output[i] + 127) // 128)
                if inside >= slots * ranks or (held + need > room * ranks and held > 0):
                    break
                if fresh[i] > 0 and lanes == ranks:
                    break
                state[i] = 1 if fresh[i] > 0 else 2
                lanes += fresh[i] > 0
                if fresh[i] == 0:
                    first[i] = now
                    missing[i] -= 1
                inside += 1
                held += need
        decoding = 0
        longest = 0.0
        for i in range(came):
            if state[i] == 2:
                decoding += 1
            elif state[i] == 1:
                size = min(left[i], chunk)
                longest = max(longest, prefill[0] + prefill[1] * size + prefill[2] * size * (start[i] + size / 2))
        if inside == 0:
            now = arrival[came]
            continue
        now += longest + (step_seconds(step, decoding / ranks) if decoding else 0.0)
        newly = 0
        for i in range(came):
            if state[i] == 2:
                tokens = 1
                for chance in chances:
                    if np.random.random() >= chance:
                        break
                    tokens += 1
                missing[i] -= tokens
                if missing[i] <= 0:
                    state[i], done[i] = 3, now
                    newly += 1
            elif state[i] == 1:
                size = min(left[i], chunk)
                left[i] -= size
                start[i] += size
                if left[i] <= 0:
                    state[i], first[i] = 2, now
                    missing[i] -= 1
                    if missing[i] <= 0:
                        state[i], done[i] = 3, now
                        newly += 1
        finished += newly
        if closed:
            for _ in range(newly):
                if came < n:
                    arrival[came] = now
                    came += 1
    return arrival, first, done
