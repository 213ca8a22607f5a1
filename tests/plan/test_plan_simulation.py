"""The aggregated simulation against one that does every step and every token by itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.tools.stepwise_simulation import simulate_steps
from glm5_ascend.plan.efficiency import fitted_efficiencies
from glm5_ascend.plan.hardware import load_hardware
from glm5_ascend.plan.layout import Engine, Layout
from glm5_ascend.plan.model import named
from glm5_ascend.plan.predict import predict
from glm5_ascend.plan.simulate import Costs, Trace, simulate, simulate_disaggregated
from glm5_ascend.plan.tails import engine_costs, make_trace
from glm5_ascend.plan.workload import Workload

LOAD = Workload(3500, 1500, 64)
MODEL, A3 = named("glm-5.1", "w8a8c8", "li", True), load_hardware("a3")
ENGINE = Engine(4, 8, sequences=32, utilization=0.92, buffer_mb=400)


@pytest.fixture(scope="module")
def table() -> Costs:
    return engine_costs(MODEL, A3, ENGINE, fitted_efficiencies(), LOAD)


@pytest.mark.parametrize(("rate", "closed"), [(0.5, 0), (1.0, 0), (1.0, 64)])
def test_aggregated_steps_are_within_two_percent(table: Costs, rate: float, closed: int) -> None:
    trace = make_trace(LOAD, 400, rate)
    fast = simulate(table, trace, closed).summary()
    slow = [simulate_steps(table, trace, closed, seed).summary() for seed in range(3)]
    for key in ("output_tokens_per_s", "ttft_mean", "tpot_mean"):
        assert fast[key] == pytest.approx(np.mean([run[key] for run in slow]), rel=0.02), key


def test_full_cache_makes_requests_wait(table: Costs) -> None:
    small = replace(table, capacity=2 * 5120)
    trace = make_trace(LOAD, 200, 1.0)
    tight, wide = simulate(small, trace).summary(), simulate(table, trace).summary()
    assert tight["ttft_p99"] > 5 * wide["ttft_p99"]
    exact = simulate_steps(small, trace).summary()
    assert tight["ttft_mean"] == pytest.approx(exact["ttft_mean"], rel=0.02)


def test_everyone_is_served_once_and_in_order_of_time(table: Costs) -> None:
    trace = make_trace(LOAD, 300, 2.0)
    outcome = simulate(table, trace)
    assert (outcome.first > trace.arrival).all()
    assert (outcome.done > outcome.first).all()
    assert np.array_equal(outcome.output, trace.output)


def test_an_empty_engine_serves_one_request_in_its_own_time(table: Costs) -> None:
    one = Trace(np.array([5.0]), np.array([4096]), np.array([0]), np.array([101]))
    outcome = simulate(table, one)
    fixed, token, pair = table.prefill
    assert outcome.first[0] - 5.0 == pytest.approx(fixed + 4096 * token + 4096 * 2048 * pair)
    steps = np.ceil(100 / table.gain)
    assert outcome.done[0] - outcome.first[0] == pytest.approx(steps * table.step[1] / table.ranks, rel=1e-6)


def test_prefill_apart_keeps_decoding_steady(table: Costs) -> None:
    """The purpose of PD: without prefills between decode steps the time per token is steady."""
    trace = make_trace(LOAD, 600, 1.2)
    together = simulate(table, trace).summary()
    apart = simulate_disaggregated(table, table, trace, 0.05).summary()
    assert apart["tpot_p99"] < together["tpot_p99"]
    assert apart["ttft_mean"] > 0.05


def test_steady_state_agrees_with_the_simulation(table: Costs) -> None:
    """Two ways to the same throughput: a fixed point, and requests one by one."""
    trace = make_trace(LOAD, 1500, 1.0)
    simulated = simulate(table, trace, closed=64).summary()["output_tokens_per_s"]
    formula = predict(MODEL, A3, Layout(ENGINE), fitted_efficiencies(), LOAD)
    assert formula is not None
    assert simulated == pytest.approx(formula.output_per_second, rel=0.1)


def test_a_prompt_cached_whole_decodes_from_the_moment_it_comes() -> None:
    """Three steps of a second give the three tokens after the first."""
    table = Costs(1, 2, 1 << 20, 1024, 1.0, np.array([0.0, 1.0, 1.0]), (0.0, 1e-3, 0.0), ())
    one = Trace(np.zeros(1), np.zeros(1, np.int64), np.full(1, 100), np.full(1, 4))
    for outcome in (simulate(table, one), simulate_steps(table, one)):
        assert (outcome.first[0], outcome.done[0]) == (0.0, 3.0)
