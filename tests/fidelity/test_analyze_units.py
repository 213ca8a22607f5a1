"""Units of `analyze`: no type that it may propose is one that `verify` warns of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from glm5_ascend.checkpoint.schemes import FLOAT, W8A8, W8A8_DYNAMIC
from glm5_ascend.checkpoint.source import open_source
from glm5_ascend.fidelity.analysis.recipe import with_fallbacks
from glm5_ascend.fidelity.analysis.run import analyze, prepare
from glm5_ascend.fidelity.analysis.units import Unit, fallbacks, units
from glm5_ascend.fidelity.options import AnalyzeOptions
from glm5_ascend.quantize.methods.gptq import GPTQ
from glm5_ascend.quantize.methods.method import Method
from glm5_ascend.quantize.methods.minmax import MINMAX
from glm5_ascend.quantize.plan import QuantizationPlan
from glm5_ascend.quantize.recipe import Recipe, find_recipe, load_recipe
from tests.support.recipes import STATIC, linear
from tests.support.tiny_model import write_calibration


def plan_of(source: Path, recipe: Path) -> QuantizationPlan:
    return QuantizationPlan(open_source(source), load_recipe(recipe))


def split_layers(plan: QuantizationPlan) -> list[int]:
    """Layers with one query projection in FLOAT and the other one not."""
    layers = range(plan.config.num_hidden_layers)
    first, second = (
        [plan.linears[plan.config.spec.layer_prefix(layer) + name].scheme == FLOAT for layer in layers]
        for name in plan.config.engines.query_projections
    )
    return [layer for layer in layers if first[layer] != second[layer]]


def recipe_with(folder: Path, float_ones: list[str], static: list[str]) -> Path:
    """`rtn-w4a8` with some linears of attention FLOAT and some static."""
    value: dict[str, Any] = yaml.safe_load(find_recipe("rtn-w4a8").read_text())
    steps = [linear for step in value["spec"]["process"] for linear in step.get("configs", [step])]
    (attention,) = (step for step in steps if "*self_attn*" in step.get("include", []))
    attention["exclude"] += [*float_ones, *static]
    if static:
        value["spec"]["process"].append(linear(STATIC, attention["qconfig"]["weight"], *static))
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(value))
    return path


def with_change(plan: QuantizationPlan, recipe: Path, unit: Unit, scheme: str) -> QuantizationPlan:
    value = with_fallbacks(recipe, plan.config, [(unit, scheme)])
    return QuantizationPlan(plan.source, Recipe.model_validate(value))


@pytest.mark.parametrize("name", ["glm-5.2-w4a8", "w8a8"])
def test_no_step_splits_the_query_projections(tiny_source: Path, name: str) -> None:
    recipe = find_recipe(name)
    plan = plan_of(tiny_source, recipe)
    assert split_layers(plan) == []
    for layer in range(plan.config.num_hidden_layers):
        for unit in units(plan, layer):
            for scheme in fallbacks(unit.scheme):
                assert split_layers(with_change(plan, recipe, unit, scheme)) == [], unit.label


def test_a_recipe_that_splits_them_is_repaired(tiny_source: Path, tmp_path: Path) -> None:
    """With one of them FLOAT already, the other one's step to FLOAT ends what `verify` warns of."""
    for float_ones in (["*q_a_proj", "*kv_a_proj_with_mqa"], ["*q_b_proj"]):
        recipe = recipe_with(tmp_path, float_ones, [])
        plan = plan_of(tiny_source, recipe)
        assert split_layers(plan) == [0, 1, 2]
        queries = [unit for unit in units(plan, 1) if set(unit.modules) & set(plan.config.engines.query_projections)]
        assert len(queries) == 1 and not any(name.endswith(float_ones[0][1:]) for name in queries[0].modules)
        assert split_layers(with_change(plan, recipe, queries[0], FLOAT)) == [0, 2]


def test_two_types_in_one_unit(tiny_source: Path, tmp_path: Path) -> None:
    """Static `q_a_proj` beside `q_b_proj` with activations per token: measured as they are, FLOAT together."""
    recipe = recipe_with(tmp_path, [], ["*q_a_proj", "*kv_a_proj_with_mqa"])
    calib = write_calibration(tmp_path / "calib.jsonl")
    analysis = analyze(prepare(AnalyzeOptions(tiny_source, recipe=str(recipe), calib=calib, samples=3, seq_len=48)))
    layer = analysis.layers[1]
    (unit,) = (unit for unit in layer.units if "+" in unit.scheme)
    assert unit.label == "layer 1 self_attn.q_a_proj+kv_a_proj_with_mqa+q_b_proj"
    assert unit.scheme == f"{W8A8}+{W8A8_DYNAMIC}" and unit.noise[unit.scheme] > 0
    plan = with_change(analysis.plan, recipe, unit, FLOAT)
    changed = {name for name, planned in plan.linears.items() if planned.scheme != analysis.plan.linears[name].scheme}
    assert changed == set(unit.full_names)
    assert plan.output_bytes - analysis.plan.output_bytes == unit.nbytes[FLOAT] - unit.nbytes[unit.scheme]


@pytest.mark.parametrize(("name", "method"), [("rtn-w4a8", MINMAX), ("w4a8-best", GPTQ)])
def test_int8_experts_are_rounded_as_they_were_measured(tiny_source: Path, name: str, method: Method) -> None:
    recipe = find_recipe(name)
    plan = plan_of(tiny_source, recipe)
    (experts,) = (unit for unit in units(plan, 1) if unit.experts)
    changed = with_change(plan, recipe, experts, W8A8_DYNAMIC)
    assert {changed.linears[name].scheme for name in experts.full_names} == {W8A8_DYNAMIC}
    assert {changed.linears[name].method for name in experts.full_names} == {method}
    assert all(
        changed.linears[name] == linear for name, linear in plan.linears.items() if name not in experts.full_names
    )
