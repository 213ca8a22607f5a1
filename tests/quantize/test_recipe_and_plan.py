"""Recipes and plans: what a recipe selects, and that every mistake names file, line and key (or the module)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from glm5_ascend.checkpoint.source import open_source
from glm5_ascend.errors import RecipeError
from glm5_ascend.quantize import quantize
from glm5_ascend.quantize.plan import QuantizationPlan
from glm5_ascend.quantize.recipe import Selection, find_recipe, load_recipe
from glm5_ascend.quantize.selector import Selector
from glm5_ascend.verify import verify
from tests.support.recipes import DYNAMIC, INT4, INT8, STATIC, linear, write_recipe
from tests.support.tiny_model import SHARED_INDEXER, change_json, write_tiny_model


@pytest.mark.parametrize(
    "name", ["w4a8", "w8a8", "w4a8-mlapo", "w4a8c8", "w8a8c8", "rtn-w4a8", "glm-5.2-w4a8", "glm-5.2-w4a8c8"]
)
def test_shipped_recipes_plan_every_config(tmp_path: Path, tiny_source: Path, name: str) -> None:
    recipe = load_recipe(find_recipe(name))
    for source in (tiny_source, write_tiny_model(tmp_path / "52", **SHARED_INDEXER)):
        plan = QuantizationPlan(open_source(source), recipe)
        mtp = plan.config.num_hidden_layers
        assert {plan.linears[m].scheme for m in plan.linears if m.startswith(f"model.layers.{mtp}.")} == {"FLOAT"}
        attention = "W8A8" if name.startswith("w8a8") else "W8A8_DYNAMIC"
        latent = "W8A8" if name == "w4a8-mlapo" else attention
        assert plan.linears["model.layers.1.self_attn.q_b_proj"].scheme == latent
        assert plan.linears["model.layers.1.self_attn.indexer.wq_b"].scheme == attention
        experts = "W8A8_DYNAMIC" if name.startswith("w8a8") else "W4A8_DYNAMIC"
        assert plan.linears["model.layers.2.mlp.experts.3.up_proj"].scheme == experts
        marked = [0, 1, 2] if name.startswith("glm-5.2") else [1, 2]
        assert plan.cache_layers() == (marked if name.endswith("c8") else [])


@pytest.mark.parametrize("name", ["w4a8", "w8a8", "w4a8-best", "w8a8-best", "w4a8-mlapo", "w4a8c8", "w8a8c8"])
def test_no_calibrated_recipe_leaves_an_up_down_pair_rough(tiny_source: Path, name: str) -> None:
    """The input of a down_proj has the largest outliers: unsmoothed, seven times the KL where a model has some."""
    plan = QuantizationPlan(open_source(tiny_source), load_recipe(find_recipe(name)))
    for layer in range(plan.config.num_hidden_layers):
        pairs = [pair for pair in plan.config.subgraphs(layer) if pair.kind == "up-down"]
        pairs += plan.config.spec.expert_subgraphs(0) if plan.config.is_moe(layer) else []
        rounded = [
            p for p in pairs if plan.linears[plan.config.spec.layer_prefix(layer) + p.targets[0]].scheme != "FLOAT"
        ]
        assert [search.subgraph for search in plan.smoothing(layer, pairs)] == rounded


def test_unknown_recipe_lists_the_known() -> None:
    with pytest.raises(RecipeError) as error:
        find_recipe("w4a8-bst")
    assert error.value.tip.startswith("did you mean w4a8-best? shipped recipes: ")


HEAD = "apiversion: glm5_ascend_v1\nmetadata: {config_id: x}\nspec:\n  process:"
BROKEN = {
    "apiversion: x\nspec: [": r":2: not valid YAML",
    "apiversion: v9\nmetadata: {config_id: x}\nspec: {process: []}": r":1: apiversion: ",
    "apiversion: glm5_ascend_v1\nspec: {process: []}": r":1: metadata: key is missing",
    f"{HEAD} []\n  speed: 3": r":5: spec\.speed: unknown key",
    f"{HEAD}\n    - type: awq": r":5: spec\.process\.0: unknown type 'awq'; known: .*linear_quant",
    f"{HEAD}\n    - include: [a]": r":5: spec\.process\.0: without a type",
    f"{HEAD}\n    - type: quarot\n      block_size: 4": r":6: spec\.process\.0\.block_size",
    f"{HEAD} []\n  save:\n    - {{type: ascendv1_saver, part_file_size: 9}}": r":6: spec\.save\.0\.part_file_size",
    "- 1": r":1: ",
    "": r":1: ",
}


@pytest.mark.parametrize("text", BROKEN, ids=range(len(BROKEN)))
def test_recipe_errors_name_file_line_and_key(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=r"broken\.yaml" + BROKEN[text]) as error:
        load_recipe(path)
    assert "\n" not in error.value.message and error.value.tip


def test_pair_without_a_type(tmp_path: Path) -> None:
    path = write_recipe(tmp_path / "mine.yaml", linear(STATIC, INT4, "*mlp.experts.*"))
    with pytest.raises(RecipeError, match=r"mine\.yaml:\d+: spec\.process\.0\.qconfig: the format has no type"):
        load_recipe(path)


def test_selectors_are_layer_numbers(tiny_source: Path) -> None:
    config = open_source(tiny_source).config
    selects = Selector(
        Selection(include=("model.layers.{moe}.*", "model.layers.{dense}.mlp.*"), exclude=("*.up_proj",)), config
    )
    assert selects("model.layers.1.mlp.experts.0.down_proj")
    assert selects("model.layers.2.self_attn.q_a_proj")
    assert selects("model.layers.0.mlp.down_proj")
    assert not selects("model.layers.0.self_attn.q_a_proj")
    assert not selects("model.layers.3.mlp.experts.0.down_proj")  # the MTP layer is not {moe}
    assert not selects("model.layers.1.mlp.experts.0.up_proj")
    mtp = Selector(Selection(include=("model.layers.{mtp}.*",)), config)
    assert mtp("model.layers.3.eh_proj") and not mtp("model.layers.2.self_attn.o_proj")
    with pytest.raises(RecipeError, match=r"unknown selector \{odd\}"):
        Selector(Selection(include=("model.layers.{odd}.*",)), config)


def test_gate_means_the_router_and_wk_the_indexer(tiny_source: Path) -> None:
    """`*gate` must not take gate_proj out, `*wk` must take indexer.wk out."""
    selects = Selector(Selection(include=("*",), exclude=("*gate", "*wk")), open_source(tiny_source).config)
    assert selects("model.layers.1.mlp.experts.0.gate_proj")
    assert not selects("model.layers.1.mlp.gate")
    assert not selects("model.layers.1.self_attn.indexer.wk")


REFUSED: list[tuple[str, list[dict[str, Any]]]] = [
    (
        r"layers\.0\.self_attn\.kv_b_proj: it is split into W_UK and W_UV at load",
        [linear(DYNAMIC, INT8, "*kv_b_proj")],
    ),
    (r"layers\.1\.mlp\.gate: the router has no quantized", [linear(DYNAMIC, INT8, "*gate")]),
    (r"lm_head: the output head has no quantized", [linear(DYNAMIC, INT8, "lm_head")]),
    (r"o_proj: W4A8_DYNAMIC exists for routed experts only", [linear(DYNAMIC, INT4, "*o_proj")]),
    (r"shared_experts\..*routed experts only", [linear(DYNAMIC, INT4, "*shared_experts*")]),
    (r"experts\.0\.gate_proj: static W8A8 does not exist", [linear(STATIC, INT8, "*mlp.experts.*")]),
    (r"(q_a|kv_a)_proj.* one module", [linear(DYNAMIC, INT8, "*q_a_proj")]),
    (r"experts\.2\..* one module", [linear(DYNAMIC, INT4, "*mlp.experts.*", exclude=("*experts.2.*",))]),
    (
        r"two linear_quant steps disagree on .*o_proj",
        [linear(DYNAMIC, INT8, "*o_proj"), linear(STATIC, INT8, "*o_proj")],
    ),
]


@pytest.mark.parametrize(("message", "steps"), REFUSED, ids=[message for message, _ in REFUSED])
def test_plan_refuses_what_the_engine_cannot_run(
    tiny_source: Path, tmp_path: Path, message: str, steps: list[dict[str, Any]]
) -> None:
    with pytest.raises(RecipeError, match=message) as error:
        QuantizationPlan(open_source(tiny_source), load_recipe(write_recipe(tmp_path / "mine.yaml", *steps)))
    assert "\n" not in error.value.message and error.value.tip


def test_int4_needs_rows_of_eight(tmp_path: Path) -> None:
    source = open_source(write_tiny_model(tmp_path / "odd", moe_intermediate_size=20))
    experts = linear(DYNAMIC, INT4, "*mlp.experts.*", exclude=("model.layers.{mtp}.*",))
    with pytest.raises(RecipeError, match=r"gate_proj \[20, 64\]: INT4 needs rows in multiples of 8"):
        QuantizationPlan(source, load_recipe(write_recipe(tmp_path / "mine.yaml", experts)))


def test_plan_promises_exactly_what_is_written(tiny_w4a8: Path, tiny_source: Path) -> None:
    plan = QuantizationPlan(open_source(tiny_source), load_recipe(find_recipe("w4a8")))
    promised = {t.name: (t.dtype, t.shape) for t in plan.outputs()}
    stored: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for path in tiny_w4a8.glob("*.safetensors"):
        stored |= {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in load_file(path).items()}
    assert stored == promised
    rows = plan.summary()
    assert sum(row[3] for row in rows) == sum(t.nbytes for t in plan.outputs())
    assert ("routed experts", "W4A8_DYNAMIC", 2 * 4 * 3) in [row[:3] for row in rows]


def test_int8_caches_of_a_size_without_a_hadamard_matrix_are_refused(tmp_path: Path) -> None:
    """By the plan, and by `verify` in the output of another program."""
    source = write_tiny_model(tmp_path / "source", index_head_dim=92)
    with pytest.raises(RecipeError, match=r"no Hadamard matrix of size 92 \(index_head_dim\)"):
        QuantizationPlan(open_source(source), load_recipe(find_recipe("w8a8c8")))
    quantize(str(source), str(tmp_path / "out"), recipe="w8a8")
    keys = {f"model.layers.{layer}.self_attn.indexer.quant_type": "INT8_DYNAMIC" for layer in range(4)}
    change_json(tmp_path / "out/quant_model_description.json", indexer_quant_type="INT8_DYNAMIC", **keys)
    assert "no Hadamard matrix has index_head_dim 92 rows" in str(verify(tmp_path / "out", deep=False).lines())
