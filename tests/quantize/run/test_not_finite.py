"""NaN, infinity, text and impossible sizes in a source: rounding would make plausible integers of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.checkpoint.test_nonsense import ANSWER, PAGE, TABLE, with_bytes
from tests.support.command import in_process
from tests.support.tiny_model import SHARD, edited_tensors, write_calibration, write_tiny_model

Edit = Callable[[torch.Tensor], torch.Tensor]


def value(number: str) -> Edit:
    def edit(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[3] = float(number)
        return tensor

    return edit


def text(data: bytes) -> Edit:
    return lambda tensor: with_bytes(tensor, data, (tensor.nbytes - len(data)) // 2)


EMBEDDING, NORM = "model.embed_tokens.weight", "model.layers.0.input_layernorm.weight"
GATE, DOWN = (f"model.layers.1.mlp.experts.2.{name}_proj.weight" for name in ("gate", "down"))
TEXT = "holds text, not values: "


@pytest.mark.parametrize(
    ("name", "edit", "fault", "dtype", "recipe"),
    [
        (EMBEDDING, value("nan"), "1 values are NaN or infinite", "bfloat16", "w4a8"),
        (NORM, value("inf"), "1 values are NaN or infinite", "bfloat16", "rtn-w4a8"),
        (DOWN, value("-inf"), "1 values are NaN or infinite", "bfloat16", "rtn-w4a8"),
        (GATE, text(PAGE[:600]), TEXT + "'<!DOCTYPE html>", "bfloat16", "w4a8"),
        (NORM, text(PAGE[:96]), TEXT, "bfloat16", "w4a8"),
        (DOWN, text(ANSWER), TEXT + """'{"error": """, "fp8", "rtn-w4a8"),  # 448 is the largest e4m3 has
        (EMBEDDING, text(TABLE), TEXT + "'0.0123,", "float32", "w8a8"),  # of digits: tiny values
        (GATE, text(PAGE[:600]), TEXT, "float16", "rtn-w4a8"),
        ("lm_head.weight", value("1e33"), "its largest value is 9.99e+32", "bfloat16", "rtn-w4a8"),
    ],
)
def test_it_is_refused_by_name_and_nothing_is_published(
    name: str, edit: Edit, fault: str, dtype: str, recipe: str, tmp_path: Path
) -> None:
    source, calib = write_tiny_model(tmp_path / "source", dtype=dtype), write_calibration(tmp_path / "calib.jsonl")
    with edited_tensors(source) as tensors:
        tensors[name] = edit(tensors[name])
    small = [] if recipe == "rtn-w4a8" else ["--calib", calib, "--samples", 2]
    done = in_process("quantize", source, tmp_path / "out", "--recipe", recipe, "--quiet", *small)
    assert done.returncode == 2, done.stderr
    assert f"{source / SHARD}: {name}: {fault}" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_inputs_that_are_too_large_name_the_linear(tmp_path: Path) -> None:
    """Finite gains, but the squares of what comes of them are not: GPTQ has no matrix to factor."""
    source, calib = write_tiny_model(tmp_path / "source", dtype="float32"), write_calibration(tmp_path / "calib.jsonl")
    with edited_tensors(source) as tensors:
        tensors["model.layers.1.post_attention_layernorm.weight"][:] = 3e9
    small = ["--calib", calib, "--samples", 2, "--quiet"]
    done = in_process("quantize", source, tmp_path / "out", "--recipe", "w8a8-best", *small)
    assert done.returncode == 2 and "down_proj: the calibration texts give it inputs that are too large" in done.stderr


def test_an_error_that_is_no_number_is_one(tiny_source: Path) -> None:
    from glm5_ascend.checkpoint.source import open_source
    from glm5_ascend.errors import CheckpointError
    from glm5_ascend.quantize.plan import QuantizationPlan
    from glm5_ascend.quantize.recipe import find_recipe, load_recipe
    from glm5_ascend.quantize.run.store import Store

    source = open_source(tiny_source)
    plan = QuantizationPlan(source, load_recipe(find_recipe("rtn-w4a8")))
    (weight,) = [w for w in source.config.spec.expert_linears(2) if w.name.endswith("down_proj")]
    rows = torch.full(weight.shape(source.config.sizes), torch.inf)
    with pytest.raises(CheckpointError, match=r"experts\.2\.down_proj\.weight: the error of its W4A8_DYNAMIC weights"):
        Store(plan, None, None).write_rows("model.layers.1.", weight, rows, 0)  # type: ignore[arg-type]
