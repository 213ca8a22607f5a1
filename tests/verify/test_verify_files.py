"""Wrong files: shards, headers, index, description, config.json, links, pickles."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
from editor import DESCRIPTION, INDEX, SHARD, UP, Editor
from planting import Defects, Plant, assert_reported
from safetensors.torch import save_file

defect = Defects()


@defect("w4a8", "w8a8")
def truncated_shard(editor: Editor) -> str:
    os.truncate(editor.shard, editor.shard.stat().st_size - 100)
    return SHARD


@defect()
def shard_cut_inside_its_header(editor: Editor) -> str:
    os.truncate(editor.shard, 1000)
    return SHARD


@defect()
def empty_shard(editor: Editor) -> str:
    os.truncate(editor.shard, 0)
    return SHARD


@defect()
def header_length_lies(editor: Editor) -> str:
    raw = editor.shard.read_bytes()
    editor.shard.write_bytes(b"\xff" * 8 + raw[8:])
    return SHARD


@defect()
def header_shape_lies(editor: Editor) -> str:
    header, data = editor.header()
    header[f"{UP}.weight"]["shape"] = [1 << 40, 1 << 20]
    editor.write_header(header, data)
    return SHARD


@defect()
def header_offsets_overlap(editor: Editor) -> str:
    header, data = editor.header()
    header[f"{UP}.weight_offset"]["data_offsets"] = header[f"{UP}.weight_scale"]["data_offsets"]
    editor.write_header(header, data)
    return SHARD


@defect()
def header_is_no_json(editor: Editor) -> str:
    editor.shard.write_bytes((20).to_bytes(8, "little") + b"{" * 20)
    return SHARD


@defect()
def stale_shard(editor: Editor) -> str:
    save_file({"x.weight": torch.zeros(1)}, editor.directory / "model-00001-of-00002.safetensors")
    return "model-00001-of-00002.safetensors"


@defect()
def stale_shard_without_our_index(editor: Editor) -> str:
    (editor.directory / INDEX).rename(editor.directory / "quant_model_weights.safetensors.index.json")
    return stale_shard(editor)


@defect()
def tensor_in_two_shards(editor: Editor) -> str:
    save_file({"lm_head.weight": torch.zeros(320, 64)}, editor.directory / "more.safetensors")
    with editor.json(INDEX) as index:
        index["weight_map"]["lm_head.weight"] = "more.safetensors"
    return "lm_head.weight"


@defect()
def index_names_a_missing_shard(editor: Editor) -> str:
    with editor.json(INDEX) as index:
        index["weight_map"]["lm_head.weight"] = "quant_model_weights-00002-of-00002.safetensors"
    return "quant_model_weights-00002-of-00002.safetensors"


@defect()
def index_forgets_a_tensor(editor: Editor) -> str:
    with editor.json(INDEX) as index:
        del index["weight_map"][f"{UP}.weight"]
    return f"{UP}.weight"


@defect()
def index_lists_a_tensor_too_many(editor: Editor) -> str:
    with editor.json(INDEX) as index:
        index["weight_map"][f"{UP}.zero_point"] = SHARD
    return f"{UP}.zero_point"


for content in (
    "{",
    "[]",
    "{}",
    '{"weight_map": {"lm_head.weight": "../other/model.safetensors"}}',
    '{"weight_map": {"lm_head.weight": "/etc/passwd"}}',
    '{"weight_map": {"lm_head.weight": 7}}',
):
    defect.content(INDEX, content)
for text in (None, "{", "[1]", "", "[" * 100_000):
    defect.content(DESCRIPTION, text)


@defect()
def quantization_config_left(editor: Editor) -> str:
    with editor.json("config.json") as config:
        config["quantization_config"] = {"quant_method": "fp8"}
    return "config.json"


@defect()
def quantization_config_in_text_config(editor: Editor) -> str:
    with editor.json("config.json") as config:
        config["text_config"] = {"quantization_config": {"quant_method": "fp8"}}
    return "config.json"


@defect()
def schedule_lost_from_config(editor: Editor) -> str:
    with editor.json("config.json") as config:
        config["indexer_types"] = ["full", "full", "shared"]
    return "config.json"


@defect()
def pickle_in_the_directory(editor: Editor) -> str:
    (editor.directory / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    return "pytorch_model.bin"


@defect()
def link_to_the_outside(editor: Editor) -> str:
    (editor.directory / "tokenizer.json").unlink()
    (editor.directory / "tokenizer.json").symlink_to("/etc/passwd")
    return "tokenizer.json"


@defect()
def shard_is_a_link_to_the_outside(editor: Editor) -> str:
    editor.shard.rename(editor.directory.parent / "outside.safetensors")
    editor.shard.symlink_to(editor.directory.parent / "outside.safetensors")
    return SHARD


@defect.parametrize()
def test_defect_is_reported_where_it_is(
    recipe: str, plant: Plant, tiny_quantized: Callable[[str], Path], editable: Callable[[Path], Path]
) -> None:
    assert_reported(plant, editable(tiny_quantized(recipe)))
