"""Quantized checkpoints in the engine: every layer is the file's integers, every op runs once, defects are refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.conftest import Copy

pytestmark = pytest.mark.server
pytest.importorskip("vllm")

#: fp32 against int64 sums: one rounding of the sum, one of each scale multiplication. A flipped code would be 1/127.
ROUNDING = 2e-5
FUSED = {
    "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "q_a_proj": "mla_preprocess.q_c",
    "kv_a_proj_with_mqa": "mla_preprocess.q_c", "q_b_proj": "mla_preprocess.ql_nope",
}  # fmt: skip


def checked_name(tensor: str) -> str:
    """Where the check of a quantized weight is reported: the experts of a layer together, fused linears together."""
    module = tensor.removesuffix(".weight")
    if ".experts." in module:
        return module.split(".experts.")[0] + ".experts"
    parent, _, last = module.rpartition(".")
    return f"{parent}.{FUSED.get(last, last)}"


@pytest.mark.parametrize(
    "checkpoint",
    [
        "quantized_checkpoint",
        pytest.param("rotated_checkpoint", marks=pytest.mark.long),
        pytest.param("rotated_w8a8_checkpoint", marks=pytest.mark.long),
    ],
)
def test_every_layer_is_exact(checkpoint: str, request: pytest.FixtureRequest, run_engine: Any) -> None:
    """Inputs taken from the running engine, expected outputs from the file alone; each op once per layer and step."""
    directory: Path = request.getfixturevalue(checkpoint)
    report = run_engine("tests.serve.support.layer_check:main", str(directory))
    types = json.loads((directory / "quant_model_description.json").read_text())
    layers = json.loads((directory / "config.json").read_text())["num_hidden_layers"]
    quantized = {
        checked_name(name)
        for name, tensor_type in types.items()
        if name.endswith(".weight") and tensor_type != "FLOAT" and f".layers.{layers}." not in name
    }
    assert quantized <= report["errors"].keys(), quantized - report["errors"].keys()
    assert {key: error for key, error in report["errors"].items() if error > ROUNDING} == {}
    indexers = sum(f"model.layers.{i}.self_attn.indexer.wk.weight" in types for i in range(layers))
    expected = dict.fromkeys(("mla_preprocess", "sparse_flash_attention", "v_up_proj"), layers * report["steps"])
    expected |= dict.fromkeys(("indexer_preprocess", "lightning_indexer"), indexers * report["steps"])
    assert report["steps"] >= 4
    assert {name: report["ops"][name] for name in expected} == expected
    assert report["ops"].keys() - expected.keys() == {"int8_linear", "w4a8_moe"}


def test_missing_scale_bias_is_refused(run_engine: Any, quantized_checkpoint: Path, editable: Copy) -> None:
    """vLLM's own loader would serve uninitialised memory (checkpoint-format.md 12)."""
    broken = editable(quantized_checkpoint)
    (broken / "model.safetensors.index.json").unlink()  # it would name what is lost
    (shard,) = broken.glob("*.safetensors")
    tensors = load_file(shard)
    victim = "model.layers.1.mlp.experts.5.down_proj.scale_bias"
    del tensors[victim]
    save_file(tensors, shard, metadata={"format": "pt"})
    with pytest.raises(AssertionError, match=f"lacks 1 tensors the model needs; the first is {victim}"):
        engine = {"model": str(broken), "dtype": "float32", "quantization": "ascend"}
        run_engine(engine=engine)


@pytest.mark.parametrize("drafts", [0, 2])
def test_few_tokens_are_two_calls_per_layer(rotated_checkpoint: Path, run_engine: Any, drafts: int) -> None:
    """In bf16; answers are those of the single ops, but for roundings. Prompts are longer and run op by op."""
    report = run_engine("tests.serve.support.sublayer_check:main", str(rotated_checkpoint), str(drafts))
    one, other = report["one call"], report["op by op"]
    assert other["calls"] == {}
    layers = json.loads((rotated_checkpoint / "config.json").read_text())["num_hidden_layers"]
    assert one["calls"]["MlaSublayer"] >= 4 * layers and one["calls"]["MlpSublayer"] >= 4 * layers
    for got, expected in zip(one["answers"], other["answers"], strict=True):
        assert got["tokens"] == expected["tokens"]
        probabilities = [[math.exp(x) for x in answer["logprobs"]] for answer in (got, expected)]
        assert probabilities[0] == pytest.approx(probabilities[1], abs=0.03)
