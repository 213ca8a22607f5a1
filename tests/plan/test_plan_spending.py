"""Cost of prompts and answers, energy, acceptance by position, machines and formats with little data."""

from __future__ import annotations

import math

import pytest

from glm5_ascend.errors import PlanError
from glm5_ascend.plan import plan
from glm5_ascend.plan.hardware import known_hardware, load_hardware
from glm5_ascend.plan.spending import COST_INPUT, COST_OUTPUT, COST_TOTAL, ENERGY, TOKENS_PER_KWH
from glm5_ascend.plan.workload import Acceptance, accepted, parse_acceptance


@pytest.mark.parametrize("layout", ["tp=16,dp=4", "tp=4,dp=8,prefill_tp=8,prefill_dp=4"])
@pytest.mark.parametrize("load", ["in=3500,out=1500,concurrency=64", "in=30000,out=200,concurrency=16"])
def test_prompts_and_answers_together_cost_everything(layout: str, load: str) -> None:
    result = plan(nodes=4, quant="w8a8", layout=layout, workload=load, price=30.0, mtp=3).plan
    total, prompts, answers = (result.numbers[name].value for name in (COST_TOTAL, COST_INPUT, COST_OUTPUT))
    assert prompts > 0 and answers > 0
    assert prompts * result.workload.prompt / result.workload.output + answers == pytest.approx(total, rel=1e-9)
    speed = result.numbers["output_tokens_per_s"].value
    assert total == pytest.approx(30.0 * 4 / 3600 / speed * 1e6)


def test_longer_prompts_take_a_larger_share_of_the_cost() -> None:
    shares = []
    for prompt in (500, 5_000, 30_000):
        numbers = plan(layout="tp=16", mtp=3, workload=f"in={prompt},out=500,concurrency=8", price=1.0).plan.numbers
        shares.append(1 - numbers[COST_OUTPUT].value / numbers[COST_TOTAL].value)
    assert shares == sorted(shares)


def test_energy_needs_a_power_with_a_source() -> None:
    result = plan(layout="tp=16", mtp=3).plan
    power, numbers = result.cluster.hardware.power_watts, result.numbers
    assert power is not None and power.source
    tokens_per_kwh = numbers["output_tokens_per_s"].value * 3600 / (power.value / 1e3)
    assert numbers[TOKENS_PER_KWH].value == pytest.approx(tokens_per_kwh)
    assert numbers[ENERGY].value * numbers[TOKENS_PER_KWH].value == pytest.approx(1e6)
    assert ENERGY not in plan(hardware="a2", nodes=2).plan.numbers


def test_acceptance_by_position() -> None:
    acceptance = parse_acceptance("0.90,0.77,0.63")
    assert isinstance(acceptance, Acceptance) and acceptance.spread == 0
    assert [round(accepted(n, acceptance), 2) for n in range(4)] == [1.0, 1.9, 2.67, 3.3]
    assert 3.3 < accepted(5, acceptance) < 3.3 + 2 * 0.63
    ranges = parse_acceptance("0.86-0.90,0.63-0.77,0.42-0.63")
    assert isinstance(ranges, Acceptance) and ranges.spread == pytest.approx(math.log(3.30 / 2.91) / 2)
    assert parse_acceptance("2.9") == parse_acceptance(2.9) == 2.9 and parse_acceptance(None) is None
    assert accepted(3) == pytest.approx(3.157) and accepted(0) == 1.0 and accepted(3, 2.5) == pytest.approx(2.5)
    assert accepted(4) > accepted(3)


def test_the_spread_of_the_acceptance_widens_the_band() -> None:
    narrow, wide = (
        plan(layout="tp=16", mtp=3, acceptance=text).plan.numbers["output_tokens_per_s"]
        for text in ("0.88,0.70,0.525", "0.86-0.90,0.63-0.77,0.42-0.63")
    )
    assert narrow.value == pytest.approx(wide.value) and wide.high > narrow.high and wide.low < narrow.low


@pytest.mark.parametrize(
    "text", ["0.5,0.9", "1.2,0.5", "0.9,x", "0.9-0.8,0.5", "0.9,0.5-0.4-0.3", "5", "-0.1,0.1", ","]
)
def test_an_impossible_acceptance_is_an_error(text: str) -> None:
    with pytest.raises(PlanError, match="--acceptance"):
        plan(acceptance=text)


@pytest.mark.parametrize("name", known_hardware())
def test_every_machine_is_planned(name: str) -> None:
    machine = load_hardware(name)
    result = plan(hardware=name, nodes=4, quant="w4a8", mtp=3).plan
    assert machine.name == name and result.numbers["output_tokens_per_s"].value > 0
    assert any("little data" in note for note in result.notes) == (machine.little_data is not None)


@pytest.mark.parametrize("quant", ["fp8", "mxfp4"])
def test_fp8_needs_a_machine_that_multiplies_it(quant: str) -> None:
    with pytest.raises(PlanError, match="does not multiply FP8"):
        plan(model="glm-5.2", quant=quant, nodes=4)
    result = plan(model="glm-5.2", quant=quant, nodes=2, hardware="ascend-950pr").plan
    assert sum("little data" in note for note in result.notes) == 2
