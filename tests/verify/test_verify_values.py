"""Wrong numbers: scales, offsets, derived tensors, nibble order, dtypes, shapes, rotations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from editor import DESCRIPTION, DOWN, LAYER, Q_A, QUAROT, UP, Editor, nibbles, pack, unpacked
from planting import Defects, Plant, assert_reported, with_value
from safetensors.torch import load_file, save_file

defect = Defects()

for bad in (float("nan"), float("inf"), 0.0, -0.01):
    defect.change(f"{UP}.weight_scale", with_value(bad))
    defect.change(f"{Q_A}.weight_scale", with_value(bad))
    defect.change(f"{Q_A}.input_scale", with_value(bad, 0), "w8a8")
defect.change(f"{UP}.weight_offset", with_value(1.0))
defect.change(f"{Q_A}.weight_offset", with_value(-3.0), "w8a8")
defect.change(f"{LAYER}input_layernorm.weight", with_value(float("nan")))
defect.change("model.embed_tokens.weight", with_value(float("inf")))
defect.change(f"{UP}.scale_bias", lambda t: t * 2)
defect.change(f"{DOWN}.scale_bias", lambda t: t.roll(1, dims=1))
defect.change(f"{DOWN}.scale_bias", lambda t: t.sum(1, keepdim=True))  # [h, 1]: broadcast, 16 times too much
defect.change(f"{DOWN}.scale_bias", lambda t: t.sum(1, keepdim=True).expand(-1, 16) / 16)
defect.change(f"{UP}.weight_scale", lambda t: 1 / t, at=f"{UP}.scale_bias")
defect.change(f"{Q_A}.deq_scale", lambda t: t * 1.02, "w8a8")
defect.change(f"{Q_A}.deq_scale", lambda t: t.roll(1), "w8a8")
defect.change(f"{Q_A}.quant_bias", lambda t: t + 2, "w8a8")
defect.change(f"{Q_A}.quant_bias", lambda t: -t, "w8a8")
defect.change(f"{Q_A}.input_offset", lambda t: t + 0.5, "w8a8")
defect.change(f"{Q_A}.input_offset", lambda t: t * 0 + 200, "w8a8")
defect.change("rot.weight", with_value(float("nan")))

defect.change(f"{UP}.weight", lambda t: pack(*reversed(nibbles(t))), at=f"{UP}.scale_bias")
defect.change(f"{DOWN}.weight", lambda t: pack(*reversed(nibbles(t))), at=f"{DOWN}.scale_bias")
defect.change(f"{UP}.weight", unpacked)
defect.change(f"{UP}.weight", lambda t: pack(unpacked(t)[:, 0::2], unpacked(t)[:, 1::2]))  # along K
defect.change(
    f"{UP}.weight",  # the same bytes in the right shape
    lambda t: pack(unpacked(t)[:, 0::2], unpacked(t)[:, 1::2]).reshape(t.shape),
    at=f"{UP}.scale_bias",
)

defect.change(f"{UP}.weight_scale", lambda t: t.half())
defect.change(f"{UP}.weight", lambda t: t.view(torch.uint8))
defect.change(f"{Q_A}.weight", lambda t: t.to(torch.int32))
defect.change(f"{Q_A}.quant_bias", lambda t: t.float(), "w8a8")
defect.change(f"{LAYER}mlp.gate.weight", lambda t: t.to(torch.float8_e4m3fn))
defect.change(f"{LAYER}input_layernorm.weight", lambda t: t.double())
defect.change(f"{LAYER}input_layernorm.weight", lambda t: t[None])
defect.change(f"{Q_A}.weight_scale", lambda t: t.flatten())
defect.change("rot.weight", lambda t: t[:32])


defect.change("rot.weight", lambda t: t.roll(1, dims=0))
defect.change("rot.weight", lambda t: torch.diag(torch.linspace(0.5, 1.5, len(t))).to(t.dtype))  # without Q
defect.change("rot.weight", torch.zeros_like)


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


@defect.parametrize()
def test_defect_is_reported_where_it_is(
    recipe: str, plant: Plant, tiny_quantized: Callable[[str], Path], editable: Callable[[Path], Path]
) -> None:
    assert_reported(plant, editable(tiny_quantized(recipe)))
