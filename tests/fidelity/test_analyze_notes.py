"""What `analyze` tells the user besides its figures."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import yaml

from glm5_ascend.fidelity.analysis.run import AnalyzeOptions, prepare
from glm5_ascend.quantize.recipe import find_recipe


def test_a_calibration_text_that_is_not_installed_is_named(
    tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = yaml.safe_load(find_recipe("w4a8").read_text())
    recipe["apiversion"], recipe["spec"]["dataset"] = "modelslim_v1", "mix_calib.jsonl"
    (tmp_path / "stock.yaml").write_text(yaml.safe_dump(recipe))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    prepared = prepare(AnalyzeOptions(tiny_source, str(tmp_path / "stock.yaml"), samples=1, seq_len=16))
    assert len(prepared.notes) == 1
    assert "mix_calib.jsonl" in prepared.notes[0]
