"""Quantized checkpoints in the engine: every layer is the file's integers, every op runs once, defects are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.server
pytest.importorskip("vllm")

#: fp32 against int64 sums: one rounding of the sum, one of each scale multiplication. A flipped code would be 1/127.
ROUNDING = 2e-5


@pytest.fixture(scope="module", params=["rotated_checkpoint", "rotated_w8a8_checkpoint"])
def checked(request: pytest.FixtureRequest, run_engine: Any) -> tuple[Path, dict[str, Any]]:
    """W8A8_DYNAMIC attention with int4 experts, then W8A8 (static) attention with int8 experts."""
    directory: Path = request.getfixturevalue(request.param)
    return directory, run_engine("tests.serve.support.layer_check:main", str(directory))


def test_every_layer_is_exact(checked: tuple[Path, dict[str, Any]]) -> None:
    """Inputs taken from the running engine, expected outputs from the file alone."""
    directory, errors = checked[0], checked[1]["errors"]
    types = json.loads((directory / "quant_model_description.json").read_text())
    layers = json.loads((directory / "config.json").read_text())["num_hidden_layers"]
    for i in range(layers):
        names = {key.removeprefix(f"model.layers.{i}.") for key in errors if key.startswith(f"model.layers.{i}.")}
        mlp = "mlp" if f"model.layers.{i}.mlp.gate_proj.weight" in types else "mlp.shared_experts"
        expected = {"self_attn.o_proj", "self_attn.indexer.wq_b", f"{mlp}.gate_up_proj", f"{mlp}.down_proj"}
        if mlp == "mlp" and types[f"model.layers.{i}.mlp.down_proj.weight"] == "FLOAT":  # as w8a8 keeps it
            expected.remove("mlp.down_proj")
        expected |= {f"self_attn.mla_preprocess.{name}" for name in ("ql_nope", "q_pe", "q_c")}
        expected |= {"mlp.experts"} if mlp != "mlp" else set()
        assert expected <= names, expected - names
    assert {key: error for key, error in errors.items() if error > ROUNDING} == {}


def test_each_op_once_per_layer_and_step(checked: tuple[Path, dict[str, Any]]) -> None:
    counted = checked[1]["counted"]
    calls = counted["layers"] * counted["steps"]
    assert counted["steps"] >= 4
    fused = dict.fromkeys(
        ("mla_preprocess", "indexer_preprocess", "lightning_indexer", "sparse_flash_attention", "v_up_proj"), calls
    )
    assert {name: number for name, number in counted["ops"].items() if name in fused} == fused
    assert counted["ops"].keys() - fused.keys() == {"int8_linear", "w4a8_moe"}


def test_missing_scale_bias_is_refused(run_engine: Any, w4a8_checkpoint: Path, tmp_path: Path) -> None:
    """vLLM's own loader would serve uninitialised memory (checkpoint-format.md 12)."""
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    shutil.copytree(w4a8_checkpoint, broken)
    tensors = load_file(broken / "model.safetensors")
    victim = "model.layers.1.mlp.experts.5.down_proj.scale_bias"
    del tensors[victim]
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(AssertionError, match=f"lacks 1 tensors the model needs; the first is {victim}"):
        engine = {"model": str(broken), "dtype": "float32", "quantization": "ascend"}
        run_engine(engine=engine, prompts=[[20, 21]], new_tokens=1)
