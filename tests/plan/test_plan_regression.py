"""Queries whose answers were checked by hand: they stay right whatever the search and the fit do."""

from __future__ import annotations

import pytest

from glm5_ascend.plan import plan
from glm5_ascend.plan.api import Plan

#: Options, weights of a die in GB, bytes of a token, and the least time of a step (ms): bytes over the memory's rate.
BY_HAND = [
    ({"quant": "w4a8", "layout": "tp=16", "mtp": 3}, 28.03, 111_232, 23.1),
    ({"quant": "w4a8", "hardware": "a2", "layout": "tp=8", "mtp": 3}, 53.32, 111_232, 36.2),
    ({"quant": "w8a8", "nodes": 2, "layout": "tp=16,dp=2", "mtp": 3}, 27.33, 111_232, 18.9),
    ({"model": "glm-5.2", "quant": "w4a8c8", "layout": "tp=8,dp=2", "mtp": 3}, 28.72, 93_868, 18.9),
    ({"quant": "bf16", "nodes": 4, "layout": "tp=8,dp=8", "mtp": 0}, 31.36, 109_824, 11.3),
    (
        {"model": "glm-5.1", "quant": "w8a8c8", "nodes": 4, "layout": "tp=1,dp=32,prefill_tp=8,prefill_dp=4", "mtp": 3},
        46.52, 101_278, 26.1,
    ),
]  # fmt: skip
ACCEPTED = 3.157


@pytest.mark.parametrize(("asked", "weights", "token", "least"), BY_HAND, ids=lambda value: str(value)[:60])
def test_by_hand(asked: dict[str, object], weights: float, token: int, least: float) -> None:
    result = plan(**asked, workload="in=3500,out=1500,concurrency=16")  # type: ignore[arg-type]
    assert result.numbers["weight_bytes_per_die"].value / 1e9 == pytest.approx(weights, rel=0.03)
    assert result.numbers["kv_bytes_per_token"].value == token
    # the bound is of a full batch: a step of one or two requests per rank reads fewer experts
    assert result.numbers["tpot_ms"].value > 0.3 * least / (ACCEPTED if asked["mtp"] else 1.0)


#: An audit's kinds of queries: model and machines, weights, load. Each pair of neighbours in a load's list is compared.
MACHINES = (
    ("glm-5", "a3", 1, "w4a8"), ("glm-5", "a3", 2, "w8a8"), ("glm-5.1", "a3", 4, "w8a8c8"), ("glm-5", "a2", 2, "w4a8"),
    ("glm-5.2", "a3", 1, "w4a8c8"), ("glm-5.3", "a3-roce", 2, "w8a8c8"),
)  # fmt: skip
LOADS = (
    *(f"in={n},out=500,concurrency=4" for n in (128, 128_000)),
    *(f"in=3500,out=1500,concurrency={n}" for n in (1, 16, 256)),
    *(f"in=8000,out={n},concurrency=8" for n in (1, 4096)),
    "in=64000,out=1000,concurrency=16,prefix_hit=0.9", "in=3500,out=1500,concurrency=64,rate=0.5",
    "in=3500,out=1500,concurrency=32,requests=32", "in=1,out=2,concurrency=0.5", "in=100000,out=100,concurrency=2",
)  # fmt: skip


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: "-".join(map(str, machine)))
def test_an_audits_queries_stay_right(machine: tuple[str, str, int, str]) -> None:
    """Loads on clusters: no memory below zero, no step faster than the die's memory, ranges in order."""
    model, hardware, nodes, quant = machine
    for load in LOADS:
        result = plan(model=model, hardware=hardware, nodes=nodes, quant=quant, workload=load)
        numbers, prediction, where = result.numbers, result.best.prediction, f"{machine} {load}"
        assert all(n.low <= n.value <= n.high for n in numbers.values()), where
        assert (
            prediction.memory.budgets["high"] > 0 and result.best.layout.nodes(result.question.hardware) <= result.nodes
        ), where
        always = sum(
            size for name, size in prediction.memory.weights.items() if name in ("attention", "dense MLP and router")
        )
        bound = always / result.question.hardware.rates.memory
        assert result.step.seconds > bound and prediction.tpot >= bound / (result.best.layout.decode.drafts + 1) * (
            result.question.workload.output > 1
        ), where
        assert numbers["ttft_ms"].value > 0 and numbers["max_context_tokens"].value <= 1_048_576, where


def _speed(result: Plan) -> float:
    return result.numbers["output_tokens_per_s"].value


def test_more_context_is_never_quicker_and_more_clients_never_slower() -> None:
    common = {"quant": "w4a8", "layout": "tp=16", "mtp": 3}
    long = [plan(**common, workload=f"in={n},out=500,concurrency=1") for n in (500, 4000, 32_000, 128_000)]  # type: ignore[arg-type]
    waits = [result.numbers["tpot_ms"].value for result in long]
    assert waits == sorted(waits)
    many = [plan(**common, workload=f"in=3500,out=500,concurrency={n}") for n in (1, 4, 16, 64)]  # type: ignore[arg-type]
    speeds = [_speed(result) for result in many]
    assert speeds == sorted(speeds)


def test_the_public_memory_number_is_in_its_range() -> None:
    """vllm-ascend 10918: GLM-5.2 bf16 on four A2, DP4 TP8: 2.01 GiB were left for the cache."""
    result = plan(model="glm-5.2", quant="bf16", hardware="a2", nodes=4, layout="tp=8,dp=4,dsa_cp=0", mtp=3,
                workload="in=1000,out=100,concurrency=4")  # fmt: skip
    budget = result.numbers["kv_budget_bytes_per_die"]
    assert budget.low <= 2.01 * 2**30 <= budget.high and budget.value < 4 * 2**30
