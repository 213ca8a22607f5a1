"""Cost of prompts and answers, energy, acceptance by position, machines and formats with little data."""

from __future__ import annotations

import math

import pytest

from glm5_ascend.errors import PlanError
from glm5_ascend.plan import plan
from glm5_ascend.plan.hardware import known_hardware, load_hardware
from glm5_ascend.plan.spending import ANSWERS, ENERGY, PER_KWH, PROMPTS, WHOLE
from glm5_ascend.plan.workload import Acceptance, accepted, parse_acceptance


@pytest.mark.parametrize("layout", ["tp=16,dp=4", "tp=4,dp=8,prefill_tp=8,prefill_dp=4"])
@pytest.mark.parametrize("load", ["in=3500,out=1500,concurrency=64", "in=30000,out=200,concurrency=16"])
def test_prompts_and_answers_together_cost_everything(layout: str, load: str) -> None:
    made = plan(nodes=4, quant="w8a8", layout=layout, workload=load, price=30.0, mtp=3).plan
    whole, prompts, answers = (made.numbers[name].value for name in (WHOLE, PROMPTS, ANSWERS))
    ratio = made.workload.prompt / made.workload.output
    assert prompts > 0 and answers > 0
    assert prompts * ratio + answers == pytest.approx(whole, rel=1e-9)
    speed = made.numbers["output_tokens_per_s"].value
    assert whole == pytest.approx(30.0 * 4 / 3600 / speed * 1e6)


def test_longer_prompts_take_more_of_the_money() -> None:
    shares = []
    for prompt in (500, 5_000, 30_000):
        numbers = plan(layout="tp=16", mtp=3, workload=f"in={prompt},out=500,concurrency=8", price=1.0).plan.numbers
        shares.append(1 - numbers[ANSWERS].value / numbers[WHOLE].value)
    assert shares == sorted(shares)


def test_energy_needs_a_power_with_a_source() -> None:
    made = plan(layout="tp=16", mtp=3).plan
    power = made.cluster.hardware.power_watts
    assert power is not None and "SemiAnalysis" in power.source
    speed = made.numbers["output_tokens_per_s"].value
    assert made.numbers[PER_KWH].value == pytest.approx(speed * 3600 / (power.value / 1e3))
    assert made.numbers[ENERGY].value * made.numbers[PER_KWH].value == pytest.approx(1e6)
    half = plan(layout="tp=16", mtp=3, power=power.value / 2)
    assert half.plan.numbers[ENERGY].value == pytest.approx(made.numbers[ENERGY].value / 2)
    assert any("--power-usage" in line for line in half.lines())
    assert ENERGY not in plan(hardware="a2", nodes=2).plan.numbers
    with pytest.raises(PlanError, match="--power-usage"):
        plan(power=0.0)


def test_acceptance_by_position() -> None:
    found = parse_acceptance("0.90,0.77,0.63")
    assert isinstance(found, Acceptance) and found.spread == 0
    assert [round(accepted(n, found), 2) for n in range(4)] == [1.0, 1.9, 2.67, 3.3]
    assert 3.3 < accepted(5, found) < 3.3 + 2 * 0.63
    wide = parse_acceptance("0.86-0.90,0.63-0.77,0.42-0.63")
    assert isinstance(wide, Acceptance) and wide.spread == pytest.approx(math.log(3.30 / 2.91) / 2)
    assert parse_acceptance("2.9") == parse_acceptance(2.9) == 2.9 and parse_acceptance(None) is None
    assert accepted(3, parse_acceptance("0.5,0.25")) == pytest.approx(1.875)


def test_its_spread_is_in_the_band() -> None:
    narrow, wide = (
        plan(layout="tp=16", mtp=3, acceptance=text).plan.numbers["output_tokens_per_s"]
        for text in ("0.88,0.70,0.525", "0.86-0.90,0.63-0.77,0.42-0.63")
    )
    assert narrow.value == pytest.approx(wide.value) and wide.high > narrow.high and wide.low < narrow.low


@pytest.mark.parametrize(
    "text", ["0.5,0.9", "1.2,0.5", "0.9,x", "0.9-0.8,0.5", "0.9,0.5-0.4-0.3", "5", "-0.1,0.1", ","]
)
def test_an_acceptance_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="--acceptance"):
        plan(acceptance=text)


@pytest.mark.parametrize("name", known_hardware())
def test_every_machine_is_planned_with_its_sources(name: str) -> None:
    machine = load_hardware(name)
    assert machine.name == name
    made = plan(hardware=name, nodes=4, quant="w4a8", mtp=3)
    assert made.plan.numbers["output_tokens_per_s"].value > 0
    assert any("little data" in note for note in made.plan.notes) == (machine.little_data is not None)


@pytest.mark.parametrize("quant", ["fp8", "mxfp4"])
@pytest.mark.parametrize("model", ["glm-5.2", "glm-5.3"])
def test_eight_bit_floats_are_only_for_machines_that_multiply_them(model: str, quant: str) -> None:
    with pytest.raises(PlanError, match="does not multiply FP8"):
        plan(model=model, quant=quant, nodes=4)
    made = plan(model=model, quant=quant, nodes=2, hardware="ascend-950pr").plan
    assert sum("little data" in note for note in made.notes) == 2
