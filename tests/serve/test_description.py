"""quant_model_description.json as the plugin reads it: an error names the tensor in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from glm5_ascend.errors import CheckpointError
from glm5_ascend.serve.plugin.description import load_description
from tests.conftest import Copy
from tests.support.tiny_model import change_json, edited_json

NAME = "quant_model_description.json"
A, MOE = "model.layers.0.self_attn", "model.layers.1.mlp"


def test_types_of_fused_and_plain_modules(tiny_w4a8: Path, editable: Copy) -> None:
    directory = editable(tiny_w4a8)
    with edited_json(directory / NAME) as types:
        del types["is_rot_used"]
        types[f"{A}.q_b_proj.weight"] = "W8A8"
    description = load_description(directory)
    assert description.type_of(f"{A}.fused_qkv_a_proj") == "W8A8_DYNAMIC"
    assert description.type_of(f"{A}.q_b_proj") == "W8A8"
    assert description.type_of(f"{MOE}.experts") == "W4A8_DYNAMIC"
    assert load_description(tiny_w4a8).is_rot_used is True and description.is_rot_used is False


def test_missing_and_broken_files(tiny_w4a8: Path, editable: Copy, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        load_description(tmp_path)
    directory = editable(tiny_w4a8)
    with edited_json(directory / NAME) as types:
        del types[f"{A}.q_a_proj.weight"]
    with pytest.raises(CheckpointError, match=r"no entry for .*q_a_proj.weight"):
        load_description(directory).type_of(f"{A}.fused_qkv_a_proj")
    change_json(directory / NAME, group_size=256)
    with pytest.raises(CheckpointError, match="group_size is 256"):
        load_description(directory)
    (directory / NAME).write_text("[]")
    with pytest.raises(CheckpointError, match="not a JSON object"):
        load_description(directory)
