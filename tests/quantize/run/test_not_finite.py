"""NaN and infinity in a source: rounding would make plausible integers of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.command import in_process
from tests.support.tiny_model import write_calibration, write_tiny_model


@pytest.mark.parametrize(
    ("name", "value", "recipe"),
    [
        ("model.embed_tokens.weight", "nan", "w4a8"),
        ("model.layers.0.input_layernorm.weight", "inf", "rtn-w4a8"),
        ("model.layers.1.mlp.experts.2.down_proj.weight", "-inf", "rtn-w4a8"),
    ],
)
def test_it_is_refused_by_name_and_nothing_is_published(recipe: str, name: str, value: str, tmp_path: Path) -> None:
    source, calib = write_tiny_model(tmp_path / "source"), write_calibration(tmp_path / "calib.jsonl")
    (path,) = [path for path in source.glob("*.safetensors") if name in load_file(path)]
    tensors = load_file(path)
    tensors[name].view(-1)[3] = float(value)
    save_file(tensors, path, metadata={"format": "pt"})
    small = ["--calib", calib, "--samples", 2, "--quiet"]
    done = in_process("quantize", source, tmp_path / "out", "--recipe", recipe, *small)
    assert done.returncode == 2, done.stderr
    assert f"{name}: 1 values are NaN or infinite" in done.stderr
    assert not (tmp_path / "out").exists()


def test_finite_values_may_add_up_to_infinity(tmp_path: Path) -> None:
    from glm5_ascend.checkpoint.source import open_source
    from glm5_ascend.quantize.run.source_weights import FloatWeights

    weights = FloatWeights(open_source(write_tiny_model(tmp_path / "source")), None, torch.device("cpu"))
    large = torch.full((4,), 3e38)
    assert weights._finite("x", large) is large
