"""Input that has no effect is named: patterns that match nothing, steps that select nothing, text that is not read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from glm5_ascend.checkpoint.source import open_source
from glm5_ascend.quantize.job import open_job
from glm5_ascend.quantize.options import QuantizeOptions
from glm5_ascend.quantize.recipe import ALIASES, find_recipe, load_recipe
from glm5_ascend.quantize.selector import without_effect
from tests.quantize.test_stock_recipes import STOCK
from tests.support.command import ROOT, in_process, worked
from tests.support.tiny_model import SHARED_INDEXER, write_calibration, write_tiny_model

RECIPES = sorted(path for path in (ROOT / "quant_recipes").glob("*.yaml"))
W4A8, C8 = "w4a8.yaml", "w4a8c8.yaml"
#: (recipe, text, its replacement, words of the warning)
EXPERTS = '["*mlp.experts.*"]\n          exclude: ["model.layers.{mtp}.*"]'
CACHES = 'include: ["*"]\n      exclude: ["model.layers.{dense}.*", "model.layers.{mtp}.*"]'
EDITS = [
    (W4A8, EXPERTS, '["*mlpp*"]', "step linear_quant: '*mlpp*'"),
    (W4A8, EXPERTS, '["*mlpp*"]', "selects no linear"),
    (W4A8, '"*weights_proj", ', '"*weights_proj", "*wkk", ', "'*wkk' matches no module"),
    (W4A8, '"*input_layernorm*"', '"*input_norm*"', "step flex_smooth_quant: '*input_norm*'"),
    (C8, CACHES, 'include: ["*indexxer*"]', "'*indexxer*' matches no"),
    (C8, CACHES, 'include: ["*kv_a*"]', "selects no indexer"),
    (W4A8, "  dataset: default", "  runner: layer_wise\n  dataset: default", "runner 'layer_wise' has no effect"),
]  # fmt: skip


def edited(recipe: str, old: str, new: str, folder: Path) -> Path:
    text = (ROOT / "quant_recipes" / recipe).read_text()
    assert old in text
    (folder / recipe).write_text(text.replace(old, new))
    return folder / recipe


@pytest.mark.parametrize(("recipe", "old", "new", "words"), EDITS, ids=[words for *_, words in EDITS])
def test_what_a_recipe_says_in_vain(
    recipe: str, old: str, new: str, words: str, tiny_source: Path, tmp_path: Path
) -> None:
    job = open_job(QuantizeOptions(tiny_source, tmp_path / "out", str(edited(recipe, old, new, tmp_path))))
    assert any(words in warning for warning in job.warnings), job.warnings


def test_the_command_shows_it(tiny_source: Path, tmp_path: Path) -> None:
    """On the screen, in --json, and in the provenance."""
    path = edited("rtn-w4a8.yaml", EXPERTS, '["*mlpp*"]', tmp_path)
    done = worked(in_process("quantize", tiny_source, tmp_path / "out", "--recipe", path, "--json"))
    warnings = json.loads(done.stdout)["warnings"]
    assert len(warnings) == 2 and all(f"warning: {warning}" in done.stderr for warning in warnings)
    record = json.loads((tmp_path / "out" / "glm5_ascend_provenance.json").read_text())
    assert set(warnings) <= set(record["notes"])


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipes_say_nothing_in_vain(path: Path, tmp_path: Path) -> None:
    """Also on a model without dense layers, without MTP layers, and with shared indexers."""
    models = ({}, {"first_k_dense_replace": 0}, {"num_nextn_predict_layers": 0}, SHARED_INDEXER)
    for number, keys in enumerate(models):
        source = open_source(write_tiny_model(tmp_path / str(number), **keys))
        assert without_effect(load_recipe(path), source.config) == []


def test_a_second_step_for_the_latent_cache_is_named(tiny_source: Path, tmp_path: Path) -> None:
    """msModelSlim's recipes for 5.2 and 5.3 have a step for the KV latent, which is a switch of the engine here."""
    path = tmp_path / "stock.yaml"
    second = "    - {type: fa3_quant, qconfig: {dtype: int8, scope: per_token, symmetric: True}, "
    second += 'include: ["*self_attn.kv*"]}\n'
    head, tail = STOCK.replace("MTP", "3").split("    - {type: flex_smooth_quant", 1)
    path.write_text(f"{head}{second}    - {{type: flex_smooth_quant{tail}")
    job = open_job(QuantizeOptions(tiny_source, tmp_path / "out", str(path)))
    assert any("enable_sparse_sfa_c8" in warning for warning in job.warnings), job.warnings


def test_calibration_text_that_is_not_read(tiny_source: Path, tmp_path: Path) -> None:
    calib = write_calibration(tmp_path / "calib.jsonl")
    job = open_job(QuantizeOptions(tiny_source, tmp_path / "out", "rtn-w4a8", calib=calib))
    assert [warning for warning in job.warnings if "--calib" in warning and "not read" in warning]


@pytest.mark.parametrize("name", ALIASES)
def test_other_names_of_recipes(name: str, tiny_source: Path, tmp_path: Path) -> None:
    assert find_recipe(name) == find_recipe(ALIASES[name])
    job = open_job(QuantizeOptions(tiny_source, tmp_path / "out", name))
    assert job.plan.recipe.metadata.config_id == ALIASES[name]
    help_text, known = in_process("quantize", "--help").stdout, in_process("quantize", "a", "b", "--recipe", "glm-5.3")
    assert name in "".join(help_text.split()) and name in known.stderr
