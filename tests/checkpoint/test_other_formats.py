"""Folders that are no GLM-5 checkpoint in bf16, FP8 or our format: every command names what they are, alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from glm5_ascend.checkpoint.source import open_source
from glm5_ascend.errors import Glm5Error
from glm5_ascend.model.config_file import quantization_name, read_config
from tests.conftest import Copy
from tests.support.command import assert_one_clear_line, in_process
from tests.support.tiny_model import edited_tensors, tiny_config, write_tiny_model

HF_QUANT = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
INT4 = {"group_0": {"weights": {"num_bits": 4, "type": "int", "strategy": "channel"}}}
#: (quantization_config, what is named)
CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4 by 'modelopt'"),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "W4A8_AWQ by 'modelopt'"),
    ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4"}}}, "'quark'"),
    ({"quant_method": "awq", "bits": 4, "group_size": 128}, "'awq', 4 bits"),
    ({"quant_method": "gptq", "bits": 4}, "'gptq', 4 bits"),
    ({"quant_method": "auto-round", "bits": 4}, "'auto-round', 4 bits"),
    ({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": INT4}, "pack-quantized by"),
    ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": INT4}, "nvfp4-pack"),
    ({"quant_method": "exl3", "bits": 3.0}, "'exl3', 3.0 bits"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
    ({"quant_method": "w4afp8"}, "'w4afp8'"),
    ({"quant_method": "brand-new"}, "'brand-new'"),
    ({"bits": 4, "group_size": 64}, "a format without quant_method, 4 bits"),
]  # fmt: skip
FP8 = [
    {"quant_method": "fp8", "weight_block_size": [128, 128]},
    {"weight_block_size": [128, 128]},
    {"quant_method": "fbgemm_fp8"},
    {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
    {"quant_method": "compressed-tensors", "format": "float-quantized",
     "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}}},
]  # fmt: skip


def folder(directory: Path, files: dict[str, object]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return directory


@pytest.mark.parametrize(("value", "name"), CONFIGS, ids=[name for _, name in CONFIGS])
def test_a_quantization_config_is_named(value: dict[str, Any], name: str, tmp_path: Path) -> None:
    """By config.json alone: no shape of a weight is asked before."""
    folder(tmp_path, {"config.json": tiny_config(quantization_config=value)})
    with pytest.raises(Glm5Error, match=r"quantized already: .*config\.json: quantization_config") as caught:
        read_config(tmp_path)
    assert name in caught.value.message and "bf16" in caught.value.tip


@pytest.mark.parametrize("value", FP8)
def test_fp8_is_a_source(value: dict[str, Any]) -> None:
    assert quantization_name(value) is None


#: name -> (files of the folder, words of the line, words of the way out)
FOLDERS: dict[str, tuple[dict[str, object], str, str]] = {
    "hf_quant_config": ({"config.json": tiny_config(), "hf_quant_config.json": HF_QUANT}, "NVFP4", "bf16"),
    "mlx": ({"config.json": tiny_config(quantization={"bits": 4, "group_size": 64})}, "MLX, 4 bits", "bf16"),
    "mindie": ({"config.json": tiny_config(quantize="w8a8_dynamic")}, "MindIE", "bf16"),
    "modelslim v0": (
        {"config.json": tiny_config(), "quant_model_description_w8a8_dynamic.json": {}},
        "quant_model_description_w8a8_dynamic.json", "rename quant_model_description_w8a8_dynamic.json",
    ),
    "gguf": ({"GLM-5-Q4_K_M.gguf": "GGUF"}, "GGUF", "bf16"),
    "gguf and config": ({"config.json": tiny_config(), "GLM-5-Q4_K_M.gguf": "GGUF"}, "GGUF", "bf16"),
    "adapter": ({"adapter_config.json": {"peft_type": "LORA", "base_model_name_or_path": "a/b"}}, "PEFT", "merge"),
    "adapter and config": ({"config.json": tiny_config(), "adapter_config.json": {}}, "PEFT adapter", "merge"),
    "pickles": ({"config.json": tiny_config(), "pytorch_model-00001.bin": ""}, "never opened", "safetensors"),
    "draft": ({"config.json": tiny_config(model_type="glm_moe_dsa_mtp")}, "'glm_moe_dsa_mtp'", "whole model"),
    "another family": ({"config.json": {"model_type": "glm4_moe"}}, "model_type is 'glm4_moe'", "GLM-5 checkpoint"),
    "patched": ({"config.json": tiny_config(model_type="deepseek_v32")}, "deepseek_v32", "restore the original"),
    "yarn": (
        {"config.json": tiny_config(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4})}, "YaRN", "original",
    ),
    "hub cache": ({"snapshots/0123/config.json": tiny_config()}, "config.json: not found", "snapshots/0123"),
}  # fmt: skip
COMMANDS = ("quantize", "verify", "doctor", "serve", "plan")


def same_line(directory: Path, words: str, fix: str) -> None:
    """All commands end in the same line, and say the same way out."""
    lines = set()
    for command in COMMANDS:
        arguments = [directory.parent / "out", "--dry-run"] if command == "quantize" else []
        done = in_process(command, directory, *arguments)
        assert_one_clear_line(done, 2, words)
        assert fix in done.stderr
        lines.add(done.stderr.strip())
    assert len(lines) == 1, lines


@pytest.mark.parametrize("name", FOLDERS)
def test_every_command_says_what_a_folder_is(name: str, tmp_path: Path) -> None:
    files, words, fix = FOLDERS[name]
    for path in files:
        (tmp_path / "model" / path).parent.mkdir(parents=True, exist_ok=True)
    same_line(folder(tmp_path / "model", files), words, fix)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    same_line(tmp_path / "model.gguf", "a GGUF file, the format of llama.cpp, not a directory", "directory")


def test_a_folder_in_our_format_keeps_its_findings(tiny_w4a8: Path, editable: Copy) -> None:
    """A description decides what a folder is; what else lies there is a finding of verify."""
    out = editable(tiny_w4a8)
    (out / "hf_quant_config.json").write_text(json.dumps(HF_QUANT))
    done = in_process("verify", out)
    assert done.returncode == 1 and "hf_quant_config.json" in done.stdout


def test_weights_of_another_quantizer(tmp_path: Path) -> None:
    """A config.json from which the quantization was removed: the dtype is asked before the shape."""
    write_tiny_model(tmp_path / "model", index=False)
    with edited_tensors(tmp_path / "model") as tensors:
        for name in [name for name in tensors if ".experts." in name]:
            tensors[name] = torch.zeros(tensors[name].shape[0], tensors[name].shape[1] // 2, dtype=torch.uint8)
    words = "stored as uint8: already quantized"
    with pytest.raises(Glm5Error) as caught:
        open_source(tmp_path / "model")
    assert words in caught.value.message and "bf16" in caught.value.tip
    for command in ("doctor", "serve"):
        assert_one_clear_line(in_process(command, tmp_path / "model"), 2, words)
    assert words in in_process("verify", tmp_path / "model").stdout
