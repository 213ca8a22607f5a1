"""The search of layouts: more nodes never lose throughput, and impossible layouts are errors."""

from __future__ import annotations

import re

import pytest

from glm5_ascend.errors import PlanError
from glm5_ascend.plan import plan
from glm5_ascend.plan.efficiency import fitted_efficiencies
from glm5_ascend.plan.hardware import Cluster, load_hardware
from glm5_ascend.plan.layout import Engine, Layout
from glm5_ascend.plan.layouts import SearchOptions, engine_counts
from glm5_ascend.plan.model import named
from glm5_ascend.plan.predict import predict
from glm5_ascend.plan.search import Candidate, rank, search
from glm5_ascend.plan.workload import Slo, Workload, parse_workload

MODEL = named("glm-5", "w4a8")
LOADS = ("in=3500,out=1500,concurrency=256", "in=65000,out=1000,concurrency=64", "in=1000,out=2000,concurrency=2000")


def candidates(hardware: str, nodes: int, load: Workload) -> list[Candidate]:
    cluster = Cluster(load_hardware(hardware), nodes)
    return search(MODEL, cluster, load, Slo(), fitted_efficiencies(), SearchOptions())


@pytest.mark.parametrize("hardware", ["a3", "a2"])
@pytest.mark.parametrize("load", LOADS)
def test_more_nodes_are_never_slower(hardware: str, load: str) -> None:
    best = 0.0
    for nodes in (*range(1, 9), 12, 15, 16, 17, 31, 32, 33, 64):
        layouts = candidates(hardware, nodes, parse_workload(load))
        if layouts:
            speed = layouts[0].prediction.output_per_second
            assert speed >= 0.9999 * best, (nodes, str(layouts[0].layout))
            best = speed
    assert best > 0


def test_numbers_of_engines_do_not_depend_on_the_cluster() -> None:
    for limit in range(2, 65):
        assert set(engine_counts(limit - 1)) <= {*engine_counts(limit), limit - 2}
        assert max(engine_counts(limit)) == limit


def test_of_equal_throughput_the_fastest_layout_is_first() -> None:
    layouts = candidates("a3", 4, Workload(3500, 1500, 480, rate=0.1))
    equal = [c for c in layouts if c.prediction.bound == "arrivals"]
    assert len(equal) > 10 and layouts[0].prediction.output_per_second == pytest.approx(150)
    assert layouts[0].prediction.residence == pytest.approx(min(c.prediction.residence for c in equal), rel=0.05)
    keys = [rank(candidate, Slo()) for candidate in layouts]
    assert keys == sorted(keys)


def test_fewer_requests_than_clients_are_that_many_clients() -> None:
    few, many = (
        plan(quant="w4a8", layout="tp=16", mtp=3, workload=f"in=3500,out=1500,concurrency={n},requests=4").plan
        for n in (4, 16)
    )
    for name in ("output_tokens_per_s", "tpot_ms"):
        assert few.numbers[name].value == pytest.approx(many.numbers[name].value, rel=0.02)


def test_dcp_has_no_prefix_hits() -> None:
    """vllm-ascend 13750: they disappear, so they must not be counted."""
    layout = Layout(Engine(16, 1, 16, split_prefill=False))
    without, with_hits = (
        predict(MODEL, load_hardware("a3"), layout, fitted_efficiencies(), Workload(60_000, 500, 4, hit))
        for hit in (0.0, 0.9)
    )
    assert without and with_hits and without.output_per_second == with_hits.output_per_second


def test_the_error_is_about_the_layout_of_the_user() -> None:
    with pytest.raises(PlanError) as caught:
        plan(quant="w8a8", layout="tp=16,dsa_cp=1", workload="in=100000,out=1000,concurrency=1")
    message = caught.value.message
    assert "layout TP16 DP1 EP16" in message and "DCP" not in message
    free, need = (float(part.split()[0]) for part in (message.split("leave ")[1], message.split("needs ")[1]))
    assert free < need


@pytest.mark.parametrize(("layout", "word"), [("tp=1,dp=48", "do not divide"), ("tp=8,dp=6,ep=0", "ep=0")])
def test_experts_are_divided_whole(layout: str, word: str) -> None:
    with pytest.raises(PlanError, match=word):
        plan(quant="w8a8", nodes=3, layout=layout)


def test_redundant_experts_make_an_odd_number_of_dies_possible_and_cost_memory() -> None:
    odd, even = (
        plan(quant="w4a8", nodes=nodes, layout=layout).plan.best
        for nodes, layout in ((3, "tp=1,dp=48,redundant=32"), (2, "tp=1,dp=32"))
    )
    assert "EP48+32" in str(odd.layout)
    experts, usual = (best.prediction.memory.weights["routed experts"] for best in (odd, even))
    assert experts == pytest.approx(usual * 6 / 8)


def test_unequal_deployments_are_proposed_if_they_are_faster() -> None:
    """Three A2 with more clients than they hold: two nodes as one engine would leave the third idle."""
    result = plan(hardware="a2", nodes=3, workload="in=3500,out=1500,concurrency=480").plan
    note = next(note for note in result.notes if note.startswith("two unequal deployments"))
    clients = [int(count) for count in re.findall(r"(\d+) clients to", note)]
    assert sum(clients) == 480 and "to 1 node with TP8" in note and "to 2 nodes with TP8" in note
    throughput = float(re.search(r"([\d,]+) tokens/s", note)[1].replace(",", ""))  # type: ignore[index]
    assert throughput > 1.1 * result.best.prediction.output_per_second
    rate = plan(hardware="a2", nodes=3, workload="in=3500,out=1500,concurrency=480,rate=1").plan
    assert not any("unequal" in note for note in rate.notes)
