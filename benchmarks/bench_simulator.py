"""The simulator: how close to a step-by-step simulation, and how long a 1-hour trace of a million requests takes.

python benchmarks/bench_simulator.py
"""

from __future__ import annotations

import time

import numpy as np

from glm5_ascend.plan.command import PlanRequest, run
from glm5_ascend.plan.efficiency import fitted_efficiencies
from glm5_ascend.plan.simulate import simulate
from glm5_ascend.plan.stepwise import simulate_steps
from glm5_ascend.plan.tails import engine_costs, make_trace

REQUESTS, HOUR, SEEDS = 1_000_000, 3600.0, 5


def request(layout: str, nodes: int, workload: str) -> PlanRequest:
    return PlanRequest(
        model="glm-5.1",
        quant="w8a8c8",
        nodes=nodes,
        workload=workload,
        mtp=3,
        layout=layout,
        cache="li",
        index_cache=True,
        seqs=32,
        utilization=0.92,
        buffer_mb=400,
    )


def main() -> None:
    plan = run(request("tp=4,dp=8", 2, "in=3500,out=1500,concurrency=64"))
    machine = plan.cluster.hardware
    table = engine_costs(plan.model, machine, plan.chosen.layout.decode, fitted_efficiencies(), plan.workload)
    print("aggregated against step by step:\n")
    print("| arrivals | tokens/s | mean TTFT | p99 TTFT | mean TPOT | p99 TPOT |\n" + "|---" * 6 + "|")
    for name, rate, closed in (("0.6 per second", 0.6, 0), ("1.0 per second", 1.0, 0), ("64 clients", 1.0, 64)):
        trace = make_trace(plan.workload, 400, rate)
        fast = simulate(table, trace, closed).summary()
        slow = [simulate_steps(table, trace, closed, seed).summary() for seed in range(SEEDS)]
        keys = ("output_tokens_per_s", "ttft_mean", "ttft_p99", "tpot_mean", "tpot_p99")
        errors = [fast[key] / np.mean([one[key] for one in slow]) - 1 for key in keys]
        print(f"| {name} | " + " | ".join(f"{100 * error:+.2f} %" for error in errors) + " |")
    replicas = 256  # 512 nodes; each replica has its share of the trace
    simulate(table, trace)  # compiled by now
    begin, served = time.perf_counter(), 0
    for seed in range(replicas):
        trace = make_trace(plan.workload, REQUESTS // replicas, REQUESTS / HOUR / replicas, seed)
        served += len(simulate(table, trace).done)
    print(f"\n{served} requests in one hour on {replicas} replicas: {time.perf_counter() - begin:.2f} s on one core")
    trace = make_trace(plan.workload, REQUESTS, REQUESTS / HOUR)
    begin = time.perf_counter()
    simulate(table, trace)
    print(f"{REQUESTS} requests in one hour on one overloaded replica: {time.perf_counter() - begin:.2f} s on one core")


if __name__ == "__main__":
    main()
