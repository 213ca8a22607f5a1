"""What the search must never do: lose throughput with more nodes, propose what is slow where a quick one is as good."""

from __future__ import annotations

import re

import pytest

from glm5_ascend.errors import PlanError
from glm5_ascend.plan import plan
from glm5_ascend.plan.efficiency import fitted_efficiencies
from glm5_ascend.plan.hardware import Cluster, load_hardware
from glm5_ascend.plan.layout import Engine, Layout
from glm5_ascend.plan.layouts import Options, counts
from glm5_ascend.plan.model import named
from glm5_ascend.plan.predict import predict
from glm5_ascend.plan.search import rank, search
from glm5_ascend.plan.workload import Slo, Workload, parse_workload

MODEL = named("glm-5", "w4a8")
LOADS = (
    "in=3500,out=1500,concurrency=256", "in=16000,out=1000,concurrency=256", "in=65000,out=1000,concurrency=64",
    "in=1000,out=2000,concurrency=2000",
)  # fmt: skip


@pytest.mark.parametrize("hardware", ["a3", "a2"])
@pytest.mark.parametrize("load", LOADS)
def test_more_nodes_are_never_slower(hardware: str, load: str) -> None:
    machine, best = load_hardware(hardware), 0.0
    nodes = (*range(1, 17), 20, 24, 31, 32, 33, 48, 63, 64)
    for number in nodes:
        cluster = Cluster(machine, number)
        found = search(MODEL, cluster, parse_workload(load), Slo(), fitted_efficiencies(), Options())
        if found:
            speed = found[0].prediction.output_per_second
            assert speed >= 0.9999 * best, (number, str(found[0].layout))
            best = speed
    assert best > 0


def test_numbers_of_engines_are_the_same_list_for_all_clusters() -> None:
    for most in range(2, 65):
        assert set(counts(most - 1)) <= {*counts(most), most - 2}
        assert max(counts(most)) == most


def test_a_rate_is_served_by_the_quickest_layout() -> None:
    """All can serve it: the one with the shortest answers is taken."""
    load = Workload(3500, 1500, 480, rate=0.1)
    cluster = Cluster(load_hardware("a3"), 4)
    found = search(MODEL, cluster, load, Slo(), fitted_efficiencies(), Options(drafts=3))
    same = [c for c in found if c.prediction.bound == "arrivals"]
    assert len(same) > 10 and found[0].prediction.output_per_second == pytest.approx(150)
    assert found[0].prediction.residence == pytest.approx(min(c.prediction.residence for c in same), rel=0.05)
    assert found[0].prediction.tpot < 0.025


def test_fewer_requests_than_clients_are_that_many_clients() -> None:
    few, many = (
        plan(quant="w4a8", layout="tp=16", mtp=3, workload=f"in=3500,out=1500,concurrency={n},requests=4").plan
        for n in (4, 16)
    )
    for name in ("output_tokens_per_s", "tpot_ms"):
        assert few.numbers[name].value == pytest.approx(many.numbers[name].value, rel=0.02)


def test_dcp_has_no_hits() -> None:
    """vllm-ascend 13750: they disappear, so they must not be counted."""
    engine = Engine(16, 1, 16, split_prefill=False)
    machine, options = load_hardware("a3"), (0.0, 0.9)
    speeds = [
        predict(MODEL, machine, Layout(engine), fitted_efficiencies(), Workload(60_000, 500, 4, hit)) for hit in options
    ]
    assert speeds[0] and speeds[1] and speeds[0].output_per_second == speeds[1].output_per_second


def test_what_does_not_fit_is_said_of_the_layout_that_was_given() -> None:
    with pytest.raises(PlanError) as caught:
        plan(quant="w8a8", layout="tp=16,dsa_cp=1", workload="in=100000,out=1000,concurrency=1")
    message = caught.value.message
    assert "layout TP16 DP1 EP16" in message and "DCP" not in message
    left, need = (float(part.split()[0]) for part in (message.split("leave ")[1], message.split("needs ")[1]))
    assert left < need, "a message may not contradict itself"


@pytest.mark.parametrize(("layout", "word"), [("tp=1,dp=48", "do not divide"), ("tp=8,dp=6,ep=0", "ep=0")])
def test_experts_are_divided_whole(layout: str, word: str) -> None:
    with pytest.raises(PlanError, match=word):
        plan(quant="w8a8", nodes=3, layout=layout)


def test_redundant_experts_make_an_odd_number_of_dies_possible_and_cost_memory() -> None:
    made = plan(quant="w4a8", nodes=3, layout="tp=1,dp=48,redundant=32").plan
    assert "EP48+32" in str(made.chosen.layout)
    own = made.chosen.prediction.memory.weights["routed experts"]
    whole = plan(quant="w4a8", nodes=2, layout="tp=1,dp=32").plan.chosen.prediction.memory.weights["routed experts"]
    assert own == pytest.approx(whole * 6 / 8)


def test_of_equal_throughput_the_lower_latency_is_first() -> None:
    found = search(
        MODEL,
        Cluster(load_hardware("a3"), 2),
        Workload(3500, 1500, 8, rate=0.05),
        Slo(),
        fitted_efficiencies(),
        Options(),
    )
    keys = [rank(candidate, Slo()) for candidate in found]
    assert keys == sorted(keys)


def test_hot_experts_slow_a_step_and_their_copies_help() -> None:
    machine = load_hardware("a3")
    engines = (Engine(1, 32), Engine(1, 32, skew=2.0), Engine(1, 32, skew=2.0, redundant=32))
    found = [
        predict(MODEL, machine, Layout(engine), fitted_efficiencies(), Workload(3500, 1500, 960)) for engine in engines
    ]
    even, hot, copied = (p.output_per_second for p in found if p)
    assert hot < copied < even
    usual, skewed = (plan(quant="w4a8", layout="tp=8,dp=2", imbalance=factor).plan for factor in (1.0, 2.0))
    assert skewed.numbers["output_tokens_per_s"].value < usual.numbers["output_tokens_per_s"].value


def test_unequal_deployments_are_named_where_they_answer_more() -> None:
    """Three A2 under more clients than they hold: two nodes as one engine would leave the third idle."""
    made = plan(hardware="a2", nodes=3, workload="in=3500,out=1500,concurrency=480").plan
    note = next(note for note in made.notes if note.startswith("two unequal deployments"))
    sizes = [int(clients) for clients in re.findall(r"(\d+) clients to", note)]
    assert sum(sizes) == 480 and "to 1 node with TP8" in note and "to 2 nodes with TP8" in note
    together = float(re.search(r"([\d,]+) tokens/s", note)[1].replace(",", ""))  # type: ignore[index]
    alone = [
        plan(hardware="a2", nodes=nodes, workload=f"in=3500,out=1500,concurrency={clients}").plan
        for nodes, clients in zip((1, 2), sizes, strict=True)
    ]
    assert together == pytest.approx(sum(p.chosen.prediction.output_per_second for p in alone), abs=1)
    assert together > 1.1 * made.chosen.prediction.output_per_second
    for quiet in ("in=3500,out=1500,concurrency=16", "in=3500,out=1500,concurrency=480,rate=1"):
        assert not any("unequal" in n for n in plan(hardware="a2", nodes=3, workload=quiet).plan.notes)


def test_a_slower_host_takes_longer_to_launch() -> None:
    """By as much as its launches take; what the dies do stays as it is."""
    usual, slow = (plan(layout="tp=16", host_time=times).plan.chosen.prediction for times in (1.0, 2.0))
    assert slow.by_limit["host"] == pytest.approx(2 * usual.by_limit["host"])
    assert slow.step_seconds - usual.step_seconds == pytest.approx(usual.by_limit["host"])
    with pytest.raises(PlanError, match="--host-time 0"):
        plan(host_time=0.0)
