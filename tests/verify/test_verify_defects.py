"""Every defect the engine's loader would swallow is planted once, and verify must name its tensor or file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from editor import (
    ATTENTION,
    DESCRIPTION,
    DOWN,
    EXPERT,
    INDEX,
    KV_A,
    LAYER,
    Q_A,
    QUAROT,
    SHARD,
    UP,
    Editor,
    nibbles,
    pack,
    unpacked,
)
from safetensors.torch import load_file, save_file

from glm5_ascend.verify import verify

Plant = Callable[[Editor], str]  # damages the checkpoint, returns the tensor or file that must be named
CASES: list[tuple[str, Plant]] = []


def defect(*recipes: str) -> Callable[[Plant], Plant]:
    """Register a defect for these recipes (w4a8 if none is given)."""

    def register(plant: Plant) -> Plant:
        CASES.extend((recipe, plant) for recipe in recipes or ("w4a8",))
        return plant

    return register


def change(name: str, edit: Callable[[torch.Tensor], torch.Tensor], recipe: str = "w4a8", at: str = "") -> None:
    """Register the defect "tensor `name` replaced by `edit(tensor)`"."""

    def plant(editor: Editor) -> str:
        with editor.tensors() as tensors:
            tensors[name] = edit(tensors[name])
        return at or name

    plant.__name__ = f"{at or name.removeprefix('model.')}:{edit.__name__.strip('<>')}{len(CASES)}"
    CASES.append((recipe, plant))


def with_value(value: float, row: int = 1) -> Callable[[torch.Tensor], torch.Tensor]:
    def put(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor[row] = value
        return tensor

    put.__name__ = f"value_{value}"
    return put


# -- values -----------------------------------------------------------------------------------------------------------
for bad in (float("nan"), float("inf"), 0.0, -0.01):
    change(f"{UP}.weight_scale", with_value(bad))
    change(f"{Q_A}.weight_scale", with_value(bad))
    change(f"{Q_A}.input_scale", with_value(bad, 0), "w8a8")
change(f"{UP}.weight_offset", with_value(1.0))
change(f"{Q_A}.weight_offset", with_value(-3.0), "w8a8")
change(f"{LAYER}input_layernorm.weight", with_value(float("nan")))
change("model.embed_tokens.weight", with_value(float("inf")))
change(f"{UP}.scale_bias", lambda t: t * 2)
change(f"{DOWN}.scale_bias", lambda t: t.roll(1, dims=1))
change(f"{DOWN}.scale_bias", lambda t: t.sum(1, keepdim=True))  # [h, 1]: the engine broadcasts it, 16 times too much
change(f"{DOWN}.scale_bias", lambda t: t.sum(1, keepdim=True).expand(-1, 16) / 16)
change(f"{UP}.weight_scale", lambda t: 1 / t, at=f"{UP}.scale_bias")
change(f"{Q_A}.deq_scale", lambda t: t * 1.02, "w8a8")
change(f"{Q_A}.deq_scale", lambda t: t.roll(1), "w8a8")
change(f"{Q_A}.quant_bias", lambda t: t + 2, "w8a8")
change(f"{Q_A}.quant_bias", lambda t: -t, "w8a8")
change(f"{Q_A}.input_offset", lambda t: t + 0.5, "w8a8")
change(f"{Q_A}.input_offset", lambda t: t * 0 + 200, "w8a8")
change("rot.weight", with_value(float("nan")))

# -- integers: nibble order and packing -------------------------------------------------------------------------------
change(f"{UP}.weight", lambda t: pack(*reversed(nibbles(t))), at=f"{UP}.scale_bias")
change(f"{DOWN}.weight", lambda t: pack(*reversed(nibbles(t))), at=f"{DOWN}.scale_bias")
change(f"{UP}.weight", unpacked)
change(f"{UP}.weight", lambda t: pack(unpacked(t)[:, 0::2], unpacked(t)[:, 1::2]))  # along the input axis: [N, K/2]
change(
    f"{UP}.weight",  # the same bytes in the right shape
    lambda t: pack(unpacked(t)[:, 0::2], unpacked(t)[:, 1::2]).reshape(t.shape),
    at=f"{UP}.scale_bias",
)

# -- dtypes and shapes ------------------------------------------------------------------------------------------------
change(f"{UP}.weight_scale", lambda t: t.half())
change(f"{UP}.weight", lambda t: t.view(torch.uint8))
change(f"{Q_A}.weight", lambda t: t.to(torch.int32))
change(f"{Q_A}.quant_bias", lambda t: t.float(), "w8a8")
change(f"{LAYER}mlp.gate.weight", lambda t: t.to(torch.float8_e4m3fn))
change(f"{LAYER}input_layernorm.weight", lambda t: t.double())
change(f"{LAYER}input_layernorm.weight", lambda t: t[None])
change(f"{Q_A}.weight_scale", lambda t: t.flatten())
change("rot.weight", lambda t: t[:32])

# -- rot and global rotation ------------------------------------------------------------------------------------------
change("rot.weight", lambda t: t.roll(1, dims=0))
change("rot.weight", lambda t: torch.diag(torch.linspace(0.5, 1.5, len(t))).to(t.dtype))  # symmetric, Q forgotten
change("rot.weight", torch.zeros_like)


@defect()
def rot_missing(editor: Editor) -> str:
    with editor.tensors() as tensors:
        del tensors["rot.weight"]
    return "rot.weight"


@defect()
def rot_not_switched_on(editor: Editor) -> str:
    with editor.json(DESCRIPTION) as description:
        del description["is_rot_used"]
    return "rot.weight"


@defect()
def rot_in_a_file_the_index_forgets(editor: Editor) -> str:
    with editor.tensors() as tensors:
        save_file({"rot.weight": tensors.pop("rot.weight")}, editor.directory / "rot.safetensors")
    return "rot.safetensors"


@defect()
def rotated_without_a_trace_of_rot(editor: Editor) -> str:
    with editor.tensors() as tensors:
        del tensors["rot.weight"]
    with editor.json(DESCRIPTION) as description:
        description["is_rot_used"] = False
    return DESCRIPTION


@defect()
def global_rotation_missing(editor: Editor) -> str:
    (editor.directory / QUAROT).unlink()
    return "global_rotation"


@defect()
def global_rotation_not_orthogonal(editor: Editor) -> str:
    q = load_file(editor.directory / QUAROT)["global_rotation"]
    save_file({"global_rotation": q * 1.01}, editor.directory / QUAROT)
    return QUAROT


@defect()
def global_rotation_of_another_run(editor: Editor) -> str:
    q = load_file(editor.directory / QUAROT)["global_rotation"]
    save_file({"global_rotation": q[:, torch.randperm(len(q))].contiguous()}, editor.directory / QUAROT)
    return "rot.weight"


# -- missing and extra tensors ----------------------------------------------------------------------------------------
def missing(*names: str, recipe: str = "w4a8") -> None:
    def plant(editor: Editor) -> str:
        with editor.tensors() as tensors:
            for name in [n for n in tensors if n.startswith(names)]:
                del tensors[name]
        return names[0] if names[0][-1] != "." else f"{names[0]}weight"

    plant.__name__ = f"missing {names[0]}"
    CASES.append((recipe, plant))


missing(f"{UP}.scale_bias")
missing(f"{UP}.weight_scale")
missing(f"{Q_A}.weight_scale")
missing(f"{Q_A}.input_scale", recipe="w8a8")
missing(f"{Q_A}.quant_bias", recipe="w8a8")
missing(f"{UP}.", f"{EXPERT}2.")  # a whole expert
missing(f"{ATTENTION}indexer.wk.", f"{ATTENTION}indexer.")  # a layer's whole indexer
missing(f"{ATTENTION}indexer.k_norm.bias")
missing("model.layers.3.eh_proj.", "model.layers.3.")  # the whole MTP layer
missing("lm_head.weight")
missing(f"{LAYER}mlp.gate.e_score_correction_bias")


@defect()
def renamed(editor: Editor) -> str:
    with editor.tensors() as tensors:
        tensors[f"{LAYER}mlp.experts.2.up.weight"] = tensors.pop(f"{UP}.weight")
    return f"{LAYER}mlp.experts.2.up.weight"


@defect()
def extra_expert(editor: Editor) -> str:
    with editor.tensors() as tensors:
        tensors[f"{EXPERT}4.up_proj.weight"] = tensors[f"{UP}.weight"].clone()
    return f"{EXPERT}4.up_proj.weight"


@defect()
def fp8_scale_left(editor: Editor) -> str:
    with editor.tensors() as tensors:
        tensors[f"{Q_A}.weight_scale_inv"] = torch.ones(1, 1)
    return f"{Q_A}.weight_scale_inv"


@defect()
def swapped_scales_of_two_experts(editor: Editor) -> str:
    with editor.tensors() as tensors:
        a, b = f"{EXPERT}1.up_proj.weight_scale", f"{UP}.weight_scale"
        tensors[a], tensors[b] = tensors[b], tensors[a]
    return f"{UP}.scale_bias"


# -- types ------------------------------------------------------------------------------------------------------------
@defect()
def expert_typed_differently(editor: Editor) -> str:
    stored = load_file(editor.shard)
    weight, scale = unpacked(stored[f"{UP}.weight"]), stored[f"{UP}.weight_scale"]
    editor.retype(UP, "W8A8_DYNAMIC", {"weight": weight, "weight_scale": scale, "weight_offset": scale * 0})
    return f"{UP}.weight"


@defect()
def kv_b_proj_quantized(editor: Editor) -> str:
    module = f"{ATTENTION}kv_b_proj"
    scale = torch.ones(64, 1)
    weight = load_file(editor.shard)[f"{module}.weight"].to(torch.int8)
    editor.retype(module, "W8A8_DYNAMIC", {"weight": weight, "weight_scale": scale, "weight_offset": scale * 0})
    return f"{module}.weight"


@defect()
def mixed_types_of_fused_siblings(editor: Editor) -> str:
    editor.retype(KV_A, "FLOAT", {"weight": torch.randn(40, 64).bfloat16()})
    return f"{KV_A}.weight"


@defect("w8a8")
def shared_input_scale_differs(editor: Editor) -> str:
    with editor.tensors() as tensors:
        for suffix in ("input_scale", "deq_scale"):
            tensors[f"{KV_A}.{suffix}"] = tensors[f"{KV_A}.{suffix}"] * 2
    return f"{KV_A}.input_scale"


def describe(key: str, value: object, at: str = "") -> None:
    """Register the defect "description says `value` (or nothing) for `key`"."""

    def plant(editor: Editor) -> str:
        with editor.json(DESCRIPTION) as description:
            description.pop(key, None)
            if value is not None:
                description[key] = value
        return at or key

    plant.__name__ = f"described {key} as {value}"
    CASES.append(("w4a8", plant))


describe(f"{KV_A}.weight", None)
describe(f"{ATTENTION}indexer.k_norm.bias", None)
describe("model.layers.3.enorm.weight", None)
describe(f"{UP}.weight_scale", None)
describe(f"{UP}.weight_scale", "FLOAT")
describe(f"{UP}.weight", "W8A16")
describe(f"{UP}.weight", 8)
describe(f"{UP}.weight", "W8A8")
describe(f"{Q_A}.weight", "W4A8_DYNAMIC")
describe(f"{Q_A}.weight_zero_point", "W8A8_DYNAMIC")
for key, value in (
    ("version", None),
    ("version", "0.9"),
    ("group_size", None),
    ("group_size", 256),
    ("is_rot_used", "no"),
):
    describe(key, value, at=DESCRIPTION)


# -- files ------------------------------------------------------------------------------------------------------------
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


def wrong_index(content: str) -> None:
    def plant(editor: Editor) -> str:
        (editor.directory / INDEX).write_text(content)
        return INDEX

    plant.__name__ = f"index {content[:40]}"
    CASES.append(("w4a8", plant))


wrong_index("{")
wrong_index("[]")
wrong_index("{}")
wrong_index('{"weight_map": {"lm_head.weight": "../other/model.safetensors"}}')
wrong_index('{"weight_map": {"lm_head.weight": "/etc/passwd"}}')
wrong_index('{"weight_map": {"lm_head.weight": 7}}')


def wrong_description(content: str | None) -> None:
    def plant(editor: Editor) -> str:
        path = editor.directory / DESCRIPTION
        path.unlink() if content is None else path.write_text(content)
        return DESCRIPTION

    plant.__name__ = f"description {content}"
    CASES.append(("w4a8", plant))


for text in (None, "{", "[1]", "", "[" * 100_000):
    wrong_description(text)


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


@pytest.mark.parametrize(("recipe", "plant"), CASES, ids=[f"{recipe}-{plant.__name__}" for recipe, plant in CASES])
def test_defect_is_an_error_that_names_its_place(
    recipe: str, plant: Plant, tiny_quantized: Callable[[str], Path], editable: Callable[[Path], Path]
) -> None:
    editor = Editor(editable(tiny_quantized(recipe)))
    wanted = plant(editor)
    report = verify(editor.directory)
    errors = [finding for finding in report.findings if finding.level == "error"]
    assert report.exit_code == 1
    assert wanted in {place for finding in errors for place in (finding.tensor, finding.file)}, report.lines()
    for finding in report.findings:
        assert finding.message and "\n" not in finding.line() and finding.fix
        assert finding.tensor or finding.file
    json.dumps(report.to_json(), allow_nan=False)
