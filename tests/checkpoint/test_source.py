"""The float source: every stored dtype comes out as fp32, and what is missing is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from glm5_ascend.checkpoint.index import CheckpointDir
from glm5_ascend.checkpoint.names import find_weights
from glm5_ascend.checkpoint.source import open_source
from glm5_ascend.errors import CheckpointError
from tests.support.tiny_model import SHARD, change_json, edited_tensors, fp8_blocks, write_tiny_model


def edit(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    with edited_tensors(directory) as tensors:
        change(tensors)
    return directory


@pytest.mark.parametrize("shape", [(128, 128), (130, 257), (300, 1)])
def test_fp8_blocks_with_a_cut_off_rest(tmp_path: Path, shape: tuple[int, int]) -> None:
    """w = weight * scale of its own 128x128 block; a scale of the neighbouring block would be far off."""
    n, k = shape
    weight = torch.randn(n, k) * torch.logspace(0, 3, n)[:, None] * torch.logspace(0, 2, k)
    stored, scale = fp8_blocks(weight)
    write_tiny_model(tmp_path, index=False)
    name = "model.embed_tokens.weight"  # any name: the shape is not checked when it is read
    source = open_source(tmp_path)
    edit(tmp_path, lambda t: t.update({name: stored, f"{name}_scale_inv": scale}))
    files = CheckpointDir(tmp_path)
    source = replace(source, files=files, names=find_weights(source.config, files.entries))
    weight_read = source.read(name)
    expected = torch.empty(n, k)
    for i in range(n):  # element by element, the definition
        for j in range(0, k, 128):
            expected[i, j : j + 128] = stored[i, j : j + 128].float() * scale[i // 128, j // 128]
    assert torch.equal(weight_read, expected)
    assert float((weight_read - weight).norm() / weight.norm()) < 0.04
    assert source.dtype(name) is torch.bfloat16


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (None, "_scale_inv is missing"),
        (torch.ones(2, 1), "_scale_inv has shape"),  # by the header: not after hours, when the layer is read
        (
            torch.full((1, 1), 119, dtype=torch.uint8),
            "_scale_inv is stored as uint8",
        ),  # of an MX format
    ],
)
def test_a_wrong_scale_of_fp8(scale: torch.Tensor | None, message: str, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight_scale_inv"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors.pop(name)
        if scale is not None:
            tensors[name] = scale

    edit(write_tiny_model(tmp_path, dtype="fp8", index=False), change)
    with pytest.raises(CheckpointError, match=message):
        open_source(tmp_path)


def test_fp8_in_other_blocks(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path, dtype="fp8")
    change_json(source / "config.json", quantization_config={"quant_method": "fp8", "weight_block_size": [64, 64]})
    with pytest.raises(CheckpointError, match=r"for blocks of \[64, 64\]"):
        open_source(tmp_path)


def test_fp8_without_scales(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is FP8 but"):
        open_source(edit(write_tiny_model(tmp_path, dtype="fp8", index=False), drop_scales))


def drop_scales(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        del tensors[name]


def test_mtp_copies_may_be_absent(tmp_path: Path) -> None:
    source = open_source(write_tiny_model(tmp_path, mtp_copies=False))
    assert torch.equal(source.read("model.layers.3.embed_tokens.weight"), source.read("model.embed_tokens.weight"))
    assert torch.equal(source.read("model.layers.3.shared_head.head.weight"), source.read("lm_head.weight"))


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.1.mlp.gate.e_score_correction_bias"])
def test_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    edit(write_tiny_model(tmp_path, index=False), lambda t: t.pop(name))
    with pytest.raises(CheckpointError, match=f"tensor {name} is missing"):
        open_source(tmp_path)


def test_wrong_shape_names_both(tmp_path: Path) -> None:
    change_json(write_tiny_model(tmp_path) / "config.json", q_lora_rank=32)
    with pytest.raises(CheckpointError, match=r"q_a_proj.weight has shape \[64, 64\], config.json says \[32, 64\]"):
        open_source(tmp_path)


def test_quantized_source_is_refused(tiny_w4a8: Path) -> None:
    with pytest.raises(CheckpointError, match="stored as int8: already quantized"):
        open_source(tiny_w4a8)


@pytest.fixture
def split_mtp(tmp_path: Path) -> Path:
    """The MTP layer (3) in a shard of its own that the index does not list."""
    write_tiny_model(tmp_path)
    with edited_tensors(tmp_path) as tensors:
        mtp = {name: tensors.pop(name) for name in sorted(tensors) if name.startswith("model.layers.3.")}
    save_file(mtp, tmp_path / "mtp.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(tensors, SHARD)}))
    return tmp_path


def test_mtp_layer_in_a_shard_the_index_forgets(split_mtp: Path) -> None:
    source = open_source(split_mtp)
    assert source.unlisted == ["mtp.safetensors"]
    stored = load_file(split_mtp / "mtp.safetensors")
    for name in ("model.layers.3.eh_proj.weight", "model.layers.3.embed_tokens.weight"):
        assert torch.equal(source.read(name), stored[name].float())


def test_a_stray_shard_replaces_nothing(split_mtp: Path) -> None:
    """The main model comes from the index alone, and a stray shard is not even opened if nothing is missing."""
    other = load_file(split_mtp / SHARD)
    save_file({name: tensor * 0 for name, tensor in other.items()}, split_mtp / "stale.safetensors")
    source = open_source(split_mtp)
    assert source.unlisted == ["mtp.safetensors"]
    assert torch.equal(source.read("lm_head.weight"), other["lm_head.weight"].float())
    (split_mtp / "stale.safetensors").write_bytes(b"no shard")
    index = split_mtp / "model.safetensors.index.json"
    files = dict.fromkeys(other, SHARD) | dict.fromkeys(load_file(split_mtp / "mtp.safetensors"), "mtp.safetensors")
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    assert open_source(split_mtp).unlisted == []


def test_index_that_forgets_the_main_model(tmp_path: Path) -> None:
    index = write_tiny_model(tmp_path) / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    save_file({"lm_head.weight": load_file(tmp_path / SHARD)["lm_head.weight"]}, tmp_path / "more.safetensors")
    del content["weight_map"]["lm_head.weight"]
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"more.safetensors: holds lm_head.weight, but the index does not list"):
        open_source(tmp_path)


def test_mtp_layer_that_is_nowhere(split_mtp: Path) -> None:
    (split_mtp / "mtp.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"tensor model.layers.3.\S+ is missing, with all of MTP layer 3"
    ) as caught:
        open_source(split_mtp)
    assert "num_nextn_predict_layers to 0" in caught.value.tip
