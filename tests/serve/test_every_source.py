"""Every type of source by the user's commands: quantize, verify, serve.

The served tokens are compared with the integer evaluation of the same files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from glm5_ascend.fidelity.evaluation.stored_model import StoredModel
from tests.serve.support import tiny_checkpoints
from tests.support.command import glm5_ascend, worked
from tests.support.mixed_experts import write_mixed_experts
from tests.support.tiny_model import fp8_blocks

pytestmark = [pytest.mark.server, pytest.mark.long]

NEW_TOKENS = 12
MIXED = "as analyze writes it"
FLOAT = ("embed_tokens", "lm_head", "shared_head", "norm", "mlp.gate.", "weights_proj", "indexer.wk", "eh_proj", "bias")


def as_hub_stores(directory: Path, dtype: str) -> Path:
    """The fp32 checkpoint in the dtype of a hub repository; FP8 with its MTP layer in a shard the index forgets."""
    path, config = directory / "model.safetensors", directory / "config.json"
    raw = json.loads(config.read_text())
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(path).items():
        if dtype == "fp8" and not any(part in name for part in FLOAT):
            stored[name], stored[f"{name}_scale_inv"] = fp8_blocks(tensor)
        else:
            stored[name] = tensor if name.endswith("e_score_correction_bias") else tensor.to(torch.bfloat16)
    raw["dtype"] = "bfloat16"
    if dtype == "fp8":
        raw["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
        ahead = f"model.layers.{raw['num_hidden_layers']}."
        mtp = {name: stored.pop(name) for name in sorted(stored) if name.startswith(ahead)}
        save_file(mtp, directory / "mtp.safetensors")
        index = {"metadata": {}, "weight_map": dict.fromkeys(stored, path.name)}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file(stored, path)
    config.write_text(json.dumps(raw))
    return directory


@pytest.mark.parametrize(
    ("dtype", "indexers", "recipe"),
    [
        pytest.param("bf16", "FFF", "w8a8", id="glm-5 bf16"),
        pytest.param("fp8", "FFF", "w4a8", id="glm-5.1 fp8"),
        pytest.param("fp8", "FSF", "w4a8-mlapo", id="glm-5.2 fp8"),
        pytest.param("bf16", "FFF", MIXED, id="glm-5 bf16, experts INT4 and INT8"),
    ],
)
def test_quantize_verify_serve(
    dtype: str, indexers: str, recipe: str, run_engine: Any, prompts: list[list[int]], tmp_path: Path
) -> None:
    source = as_hub_stores(tiny_checkpoints.write_float_checkpoint(tmp_path / "source", indexers), dtype)
    out = tmp_path / "out"
    if recipe == MIXED:
        recipe = str(write_mixed_experts(tmp_path / "mixed.yaml", source, 2))
    worked(glm5_ascend("quantize", source, out, "--recipe", recipe, "--quiet"))
    worked(glm5_ascend("verify", out, "--against", source))

    engine = {
        "model": str(out), "dtype": "float32", "quantization": "ascend",
        "speculative_config": {"method": "mtp", "num_speculative_tokens": 1},
    }  # fmt: skip
    report = run_engine(engine=engine, batches=[prompts], new_tokens=NEW_TOKENS)
    assert report["counters"]["spec_decode_num_draft_tokens"] > 0
    served = [output["tokens"] for output in report["batches"][0]]
    whole = [torch.tensor(prompt + tokens) for prompt, tokens in zip(prompts, served, strict=True)]
    expected = [x[-NEW_TOKENS - 1 : -1].argmax(-1).tolist() for x in StoredModel(out).logits(whole)]
    different = sum(
        a != b for mine, theirs in zip(served, expected, strict=True) for a, b in zip(mine, theirs, strict=True)
    )
    # Of 60. An activation between two integers may be rounded the other way, and in a random model the expert or key
    # that flips changes everything at that position; a wrong transform changes nearly all of them.
    assert different <= 6
