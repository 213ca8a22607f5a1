"""quant_model_description.json as the plugin reads it: an error names the tensor in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from glm5_ascend.errors import CheckpointError
from glm5_ascend.serve.plugin.description import QuantDescription, load_description
from tests.support.tiny_model import tiny_config

A, MOE = "model.layers.0.self_attn", "model.layers.1.mlp"


def write(directory: Path, **changes: Any) -> Path:
    """A small valid description with some keys changed (None removes a key)."""
    types: dict[str, Any] = {
        "version": "1.0.0",
        "group_size": 0,
        "metadata": {},
        f"{A}.q_a_proj.weight": "W8A8_DYNAMIC",
        f"{A}.kv_a_proj_with_mqa.weight": "W8A8_DYNAMIC",
        f"{A}.q_b_proj.weight": "W8A8",
        f"{A}.kv_b_proj.weight": "FLOAT",
        f"{A}.indexer.wk.weight": "FLOAT",
        f"{A}.indexer.k_norm.bias": "FLOAT",
        "lm_head.weight": "FLOAT",
    }
    for expert in (0, 1):
        for proj in ("gate_proj", "up_proj", "down_proj"):
            types[f"{MOE}.experts.{expert}.{proj}.weight"] = "W4A8_DYNAMIC"
    types |= changes
    types = {key: value for key, value in types.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(tiny_config(n_routed_experts=2, num_experts_per_tok=1)))
    (directory / "quant_model_description.json").write_text(json.dumps(types))
    return directory


def load(directory: Path, **changes: Any) -> QuantDescription:
    return load_description(write(directory, **changes))


def test_types_of_fused_and_plain_modules(tmp_path: Path) -> None:
    description = load(tmp_path, is_rot_used=True)
    assert description.type_of(f"{A}.fused_qkv_a_proj") == "W8A8_DYNAMIC"
    assert description.type_of(f"{A}.q_b_proj") == "W8A8"
    assert description.type_of(f"{MOE}.experts") == "W4A8_DYNAMIC"
    assert description.is_rot_used is True and load(tmp_path).is_rot_used is False


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        load_description(tmp_path)
    (tmp_path / "quant_model_description.json").write_text("[]")
    with pytest.raises(CheckpointError, match="not a JSON object"):
        load_description(tmp_path)
    with pytest.raises(CheckpointError, match="group_size is 256"):
        load(tmp_path, group_size=256)
    with pytest.raises(CheckpointError, match=r"no entry for .*q_a_proj.weight"):
        load(tmp_path, **{f"{A}.q_a_proj.weight": None}).type_of(f"{A}.fused_qkv_a_proj")
