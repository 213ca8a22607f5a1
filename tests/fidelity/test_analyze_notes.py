"""What `analyze` tells the user besides its figures."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import yaml

from glm5_ascend.fidelity.analysis.recipe import engine_notes
from glm5_ascend.fidelity.analysis.run import prepare
from glm5_ascend.fidelity.analysis.units import Unit
from glm5_ascend.fidelity.options import AnalyzeOptions
from glm5_ascend.quantize.recipe import find_recipe


def test_a_calibration_text_that_is_not_installed_is_named(
    tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = yaml.safe_load(find_recipe("w4a8").read_text())
    recipe["apiversion"], recipe["spec"]["dataset"] = "modelslim_v1", "mix_calib.jsonl"
    (tmp_path / "stock.yaml").write_text(yaml.safe_dump(recipe))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    prepared = prepare(AnalyzeOptions(tiny_source, str(tmp_path / "stock.yaml"), samples=1, seq_len=32))
    assert len(prepared.notes) == 1
    assert "mix_calib.jsonl" in prepared.notes[0]


def test_a_recipe_that_sglang_cannot_load_says_so() -> None:
    gate_up = ("mlp.experts.0.gate_proj", "mlp.experts.0.up_proj")
    experts = [Unit(n, gate_up, "W4A8_DYNAMIC", prefix=f"model.layers.{n}.") for n in range(12)]
    attention = Unit(3, ("self_attn.o_proj",), "W8A8_DYNAMIC", prefix="model.layers.3.")
    assert engine_notes([(attention, "FLOAT"), (experts[3], "W8A8_DYNAMIC")]) == []
    (line,) = engine_notes([(unit, "FLOAT") for unit in experts])
    assert line.startswith("SGLang does not load it: routed experts in FLOAT, layers 0, 1, 2, 3, 4, 5, 6, 7, ...")
    assert len(line) <= 118
