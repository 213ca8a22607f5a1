"""The simulator: its error against a step-by-step simulation, and its time for a million requests in one hour.

python benchmarks/bench_simulator.py
"""

from __future__ import annotations

import time

import numpy as np
from tools.stepwise_simulation import simulate_steps

from glm5_ascend.plan.efficiency import fitted_efficiencies
from glm5_ascend.plan.hardware import load_hardware
from glm5_ascend.plan.layout import Engine
from glm5_ascend.plan.model import named
from glm5_ascend.plan.simulate import simulate
from glm5_ascend.plan.tails import engine_costs, make_trace
from glm5_ascend.plan.workload import Workload

REQUESTS, HOUR, SEEDS = 1_000_000, 3600.0, 5


def main() -> None:
    load = Workload(3500, 1500, 64)
    engine = Engine(4, 8, sequences=32, utilization=0.92, buffer_mb=400)
    model = named("glm-5.1", "w8a8c8", "li", True)
    table = engine_costs(model, load_hardware("a3"), engine, fitted_efficiencies(), load)
    print("aggregated against step by step:\n")
    print("| arrivals | tokens/s | mean TTFT | p99 TTFT | mean TPOT | p99 TPOT |\n" + "|---" * 6 + "|")
    for name, rate, closed in (("0.6 per second", 0.6, 0), ("1.0 per second", 1.0, 0), ("64 clients", 1.0, 64)):
        trace = make_trace(load, 400, rate)
        fast = simulate(table, trace, closed).summary()
        slow = [simulate_steps(table, trace, closed, seed).summary() for seed in range(SEEDS)]
        keys = ("output_tokens_per_s", "ttft_mean", "ttft_p99", "tpot_mean", "tpot_p99")
        errors = [fast[key] / np.mean([run[key] for run in slow]) - 1 for key in keys]
        print(f"| {name} | " + " | ".join(f"{100 * error:+.2f} %" for error in errors) + " |")
    replicas = 256  # 512 nodes; each replica has its share of the trace
    simulate(table, trace)  # compiled by now
    begin, served = time.perf_counter(), 0
    for seed in range(replicas):
        trace = make_trace(load, REQUESTS // replicas, REQUESTS / HOUR / replicas, seed)
        served += len(simulate(table, trace).done)
    print(f"\n{served} requests in one hour on {replicas} replicas: {time.perf_counter() - begin:.2f} s on one core")
    trace = make_trace(load, REQUESTS, REQUESTS / HOUR)
    begin = time.perf_counter()
    simulate(table, trace)
    print(f"{REQUESTS} requests in one hour on one overloaded replica: {time.perf_counter() - begin:.2f} s on one core")


if __name__ == "__main__":
    main()
