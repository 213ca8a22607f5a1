"""Wrong sets: tensors that are missing or too many, types the engine cannot run or does not read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from editor import ATTENTION, DESCRIPTION, EXPERT, KV_A, LAYER, Q_A, UP, Editor, unpacked
from planting import Defects, Plant, assert_reported
from safetensors.torch import load_file

defect = Defects()

defect.missing(f"{UP}.scale_bias")
defect.missing(f"{UP}.weight_scale")
defect.missing(f"{Q_A}.weight_scale")
defect.missing(f"{Q_A}.input_scale", recipe="w8a8")
defect.missing(f"{Q_A}.quant_bias", recipe="w8a8")
defect.missing(f"{UP}.", f"{EXPERT}2.")  # a whole expert
defect.missing(f"{ATTENTION}indexer.wk.", f"{ATTENTION}indexer.")  # a layer's whole indexer
defect.missing(f"{ATTENTION}indexer.k_norm.bias")
defect.missing("model.layers.3.eh_proj.", "model.layers.3.")  # the whole MTP layer
defect.missing("lm_head.weight")
defect.missing(f"{LAYER}mlp.gate.e_score_correction_bias")


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


defect.describe(f"{KV_A}.weight", None)
defect.describe(f"{ATTENTION}indexer.k_norm.bias", None)
defect.describe("model.layers.3.enorm.weight", None)
defect.describe(f"{UP}.weight_scale", None)
defect.describe(f"{UP}.weight_scale", "FLOAT")
defect.describe(f"{UP}.weight", "W8A16")
defect.describe(f"{UP}.weight", 8)
defect.describe(f"{UP}.weight", "W8A8")
defect.describe(f"{Q_A}.weight", "W4A8_DYNAMIC")
defect.describe(f"{Q_A}.weight_zero_point", "W8A8_DYNAMIC")
for key, value in (
    ("version", None),
    ("version", "0.9"),
    ("group_size", None),
    ("group_size", 256),
    ("is_rot_used", "no"),
):
    defect.describe(key, value, at=DESCRIPTION)


@defect.parametrize()
def test_defect_is_reported_where_it_is(
    recipe: str, plant: Plant, tiny_quantized: Callable[[str], Path], editable: Callable[[Path], Path]
) -> None:
    assert_reported(plant, editable(tiny_quantized(recipe)))
