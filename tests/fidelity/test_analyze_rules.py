"""Recipes with rules: what analyze makes of them on a model whose layers share indexers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from glm5_ascend.checkpoint.source import open_source
from glm5_ascend.fidelity.analysis.run import analyze, prepare
from glm5_ascend.fidelity.options import AnalyzeOptions
from glm5_ascend.model.config import ModelConfig
from glm5_ascend.model.config_file import parse_config
from glm5_ascend.model.config_values import indexer_schedule
from glm5_ascend.quantize.plan import QuantizationPlan
from glm5_ascend.quantize.recipe import find_recipe, load_recipe
from tests.support.command import assert_one_clear_line, in_process, worked
from tests.support.tiny_model import SHARED_INDEXER, tiny_config, write_calibration, write_tiny_model

C8 = "glm-5.2-w4a8c8"
RULE = "keys_lost: 0.02"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers 0, 1 and 2 own an indexer; layer 3 attends to what layer 2 chose."""
    return write_tiny_model(tmp_path_factory.mktemp("shared") / "source", **SHARED_INDEXER)


@pytest.fixture(scope="module")
def base(source: Path) -> list[Any]:
    calib = write_calibration(source.parent / "calib.jsonl")
    return ["analyze", source, "--calib", calib, "--samples", 3, "--seq-len", 48]


def with_rule(folder: Path, rule: str) -> Path:
    text = find_recipe(C8).read_text()
    assert text.count(RULE) == 1
    (folder / "rule.yaml").write_text(text.replace(RULE, rule))
    return folder / "rule.yaml"


def test_who_attends_to_what_an_indexer_chose() -> None:
    """GLM-5.2's schedule: indexers in 0, 1, 2, 6, ..., 74, each for itself and the shared layers behind it."""
    layers = {"num_hidden_layers": 78, "index_topk_freq": 4, "index_skip_topk_offset": 3}
    config = parse_config(tiny_config(**layers), Path("config.json"))
    readers = [config.indexer_readers(layer) for layer in range(78)]
    assert [bool(count) for count in readers] == indexer_schedule(layers, 78)
    assert readers[:7] == [1, 1, 4, 0, 0, 0, 4] and readers[74] == 4 and sum(readers) == 78
    assert config.indexer_readers(78) == 1  # the MTP layer's own


def test_an_indexer_counts_once_for_each_of_its_layers(
    source: Path, base: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def noise() -> list[float]:
        report = analyze(prepare(AnalyzeOptions(source, recipe="rtn-w4a8", calib=base[3], samples=3, seq_len=48)))
        units = {unit.label: unit for layer in report.layers for unit in layer.units}
        return [units[f"layer {layer} self_attn.indexer.wq_b"].noise["W8A8_DYNAMIC"] for layer in range(3)]

    counted = noise()
    monkeypatch.setattr(ModelConfig, "indexer_readers", lambda config, layer: 1)
    once = noise()
    assert all(once) and [a / b for a, b in zip(counted, once, strict=True)] == pytest.approx([1, 1, 2])


def test_the_rules_decide(source: Path, base: list[Any], tmp_path: Path) -> None:
    """A rule between the layers' own figures keeps some caches wide, those that change more, and no other."""
    report = json.loads(in_process(*base, "--recipe", C8, "--json").stdout)
    caches = {layer["layer"]: layer["indexer_cache"] for layer in report["layers"]}
    assert caches[3] is None and [caches[layer]["readers"] for layer in range(3)] == [1, 1, 2]
    lost = {layer: (1 - caches[layer]["same_keys"]) * caches[layer]["readers"] for layer in range(3)}
    assert all(0 < value < 0.5 for value in lost.values())
    most = sorted(lost.values())[1]
    out = tmp_path / "mine.yaml"
    rule = with_rule(tmp_path, f"keys_lost: {most * 1.0001}")
    done = worked(in_process(*base, "--recipe", rule, "--out", out))
    (wide,) = [layer for layer, value in lost.items() if value > most]
    assert "stays in 16 bits" in done.stdout
    recipe = load_recipe(out)
    plan = QuantizationPlan(open_source(source), recipe)
    assert plan.cache_layers() == [layer for layer in range(3) if layer != wide] and recipe.spec.fallback is None
    before = QuantizationPlan(open_source(source), load_recipe(find_recipe(C8)))
    assert before.cache_layers() == [0, 1, 2]
    assert before.output_bytes < plan.output_bytes <= 1.02 * before.output_bytes
    moved = [name for name, planned in before.linears.items() if plan.linears[name] != planned]
    assert moved and {plan.linears[name].scheme for name in moved} <= {"FLOAT", "W8A8_DYNAMIC"}


def test_quantize_says_that_rules_were_not_applied(source: Path, base: list[Any], tmp_path: Path) -> None:
    small = ["--calib", base[3], "--samples", 3, "--seq-len", 48]
    done = in_process("quantize", source, tmp_path / "a", "--recipe", "glm-5.2-w4a8", *small)
    assert done.returncode == 0 and "rules for fall-backs were not applied" in done.stderr + done.stdout
    out = tmp_path / "mine.yaml"
    assert in_process(*base, "--recipe", "glm-5.2-w4a8", "--out", out).returncode == 0
    done = in_process("quantize", source, tmp_path / "b", "--recipe", out, *small)
    assert done.returncode == 0 and "rules for fall-backs" not in done.stderr + done.stdout
    assert in_process("verify", tmp_path / "b", "--against", source).returncode == 0


def test_a_rule_that_cannot_be_judged_is_refused(base: list[Any], tmp_path: Path) -> None:
    short = [16 if word == 48 else word for word in base]
    assert_one_clear_line(in_process(*short, "--recipe", C8), 2, "which keeps 16 keys", "keys_lost")
    done = in_process(*short, "--recipe", "glm-5.2-w4a8")
    assert done.returncode == 0 and "cannot measure the indexer" in done.stderr
    done = in_process(*base, "--recipe", "w4a8", "--out", tmp_path / "r.yaml")
    assert_one_clear_line(done, 2, "--out", "by rules")
    bad = with_rule(tmp_path, "keys_lost: 2")
    assert_one_clear_line(in_process(*base, "--recipe", bad), 2, "rule.yaml", "keys_lost")


def test_same_keys_against_selections(source: Path, base: list[Any]) -> None:
    """The report on a cache against the float model's operands in the basis of the source."""
    from glm5_ascend.fidelity.evaluation.stored_model import StoredModel
    from glm5_ascend.model import layers
    from tests.support.decoder_layer import decoder_layer

    prepared = prepare(AnalyzeOptions(source, recipe=C8, calib=base[3], samples=3, seq_len=48))
    cache = analyze(prepared).layers[1].cache
    model, shares = StoredModel(source), []
    for sequence in prepared.calibration.sequences:
        hidden, _ = decoder_layer(model.config, 0, model.weights(0), model.embed(sequence), None)
        weights = model.weights(1)
        x = layers.attention_input(model.config, weights, hidden)
        latent = layers.query_latent(model.config, weights, x)
        a, b = (layers.select_topk(model.config, weights, x, latent, int8) for int8 in (False, True))
        shares.append((a & b)[16:].sum(-1) / 16)
    # Smoothing changes the latent's scales, rounding to int8 then falls otherwise for a few keys.
    assert cache is not None and cache.same_keys == pytest.approx(float(torch.cat(shares).mean()), abs=0.02)
