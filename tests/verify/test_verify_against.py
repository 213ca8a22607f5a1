"""Defects a checkpoint cannot show on its own: every part is consistent, only the source says that it is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from editor import ATTENTION, DOWN, EXPERT, LAYER, PROVENANCE, UP, Editor, nibbles, pack, unpacked
from safetensors.torch import load_file, save_file
from tiny_model import write_tiny_model

from glm5_ascend.verify import verify

Tensors = dict[str, torch.Tensor]
Quantized = Callable[..., Path]
Edit = Callable[[Tensors], str]
CASES: list[tuple[str, Edit]] = []


def wrong(*recipes: str) -> Callable[[Edit], Edit]:
    def register(edit: Edit) -> Edit:
        CASES.extend((recipe, edit) for recipe in recipes)
        return edit

    return register


def with_scale_bias(tensors: Tensors, module: str) -> None:
    """Recompute scale_bias from what is stored, as a writer with a consistent mistake would."""
    w = unpacked(tensors[f"{module}.weight"]).float() * tensors[f"{module}.weight_scale"]
    columns = tensors[f"{module}.scale_bias"].shape[1]
    tensors[f"{module}.scale_bias"] = 8 * w.reshape(len(w), columns, -1).sum(-1)


@wrong("w4a8", "w8a8", "rtn-w4a8")
def expert_copied_twice(tensors: Tensors) -> str:
    for name in [name for name in tensors if name.startswith(f"{EXPERT}1.")]:
        tensors[name.replace(".experts.1.", ".experts.2.")] = tensors[name].clone()
    return f"{UP}.weight"


@wrong("w4a8", "w8a8")
def two_experts_swapped(tensors: Tensors) -> str:
    for name in [name for name in tensors if name.startswith(f"{EXPERT}1.")]:
        other = name.replace(".experts.1.", ".experts.2.")
        tensors[name], tensors[other] = tensors[other], tensors[name]
    return f"{DOWN}.weight"


@wrong("w4a8", "rtn-w4a8")
def nibble_order_with_matching_scale_bias(tensors: Tensors) -> str:
    tensors[f"{DOWN}.weight"] = pack(*reversed(nibbles(tensors[f"{DOWN}.weight"])))
    with_scale_bias(tensors, DOWN)
    return f"{DOWN}.weight"


@wrong("w4a8")
def scale_inverted_with_matching_scale_bias(tensors: Tensors) -> str:
    tensors[f"{DOWN}.weight_scale"] = 1 / tensors[f"{DOWN}.weight_scale"]
    with_scale_bias(tensors, DOWN)
    return f"{DOWN}.weight"


@wrong("w4a8", "w8a8")
def up_proj_scaled_but_not_down_proj(tensors: Tensors) -> str:
    scale = tensors[f"{UP}.weight_scale"]
    scale[3] *= 4
    if f"{UP}.scale_bias" in tensors:
        with_scale_bias(tensors, UP)
    return f"{DOWN}.weight"  # its column 3 no longer has the partner of up_proj's row 3


@wrong("w4a8", "rtn-w4a8")
def one_row_scale_of_an_int8_linear_doubled(tensors: Tensors) -> str:
    tensors[f"{ATTENTION}q_b_proj.weight_scale"][5] *= 2
    return f"{ATTENTION}q_b_proj.weight"


@wrong("w8a8")
def one_row_of_a_static_linear(tensors: Tensors) -> str:
    tensors[f"{ATTENTION}o_proj.weight_scale"][5] *= 2
    tensors[f"{ATTENTION}o_proj.deq_scale"][5] *= 2
    return f"{ATTENTION}o_proj.weight"


@wrong("w4a8")
def mtp_expert_in_another_basis(tensors: Tensors) -> str:
    name = "model.layers.3.mlp.experts.0.gate_proj.weight"
    tensors[name] = tensors[name].roll(1, dims=1)
    return name


@wrong("w4a8", "rtn-w4a8")
def embedding_row(tensors: Tensors) -> str:
    tensors["model.embed_tokens.weight"][7] *= 1.1
    return "model.embed_tokens.weight"


@wrong("w4a8", "rtn-w4a8")
def norm_gain(tensors: Tensors) -> str:
    tensors[f"{LAYER}post_attention_layernorm.weight"] *= 1.1
    return f"{LAYER}mlp.gate.weight"


@wrong("w4a8", "w8a8")
def value_rows_of_kv_b(tensors: Tensors) -> str:
    tensors[f"{ATTENTION}kv_b_proj.weight"][16:32] = tensors[f"{ATTENTION}kv_b_proj.weight"][16:32].flip(0)
    return f"{ATTENTION}kv_b_proj.weight"


@wrong("w4a8")
def router_bias(tensors: Tensors) -> str:
    name = f"{LAYER}mlp.gate.e_score_correction_bias"
    tensors[name] = tensors[name].flip(0)
    return name


@wrong("w4a8")
def indexer_norm_bias(tensors: Tensors) -> str:
    tensors[f"{ATTENTION}indexer.k_norm.bias"] *= 1.5
    return f"{ATTENTION}indexer.k_norm.bias"


@wrong("w4a8")
def rot_of_another_norm(tensors: Tensors) -> str:
    tensors["rot.weight"] *= 1.1  # still symmetric, still diagonal in the source's basis
    return "rot.weight"


@pytest.mark.parametrize(("recipe", "edit"), CASES, ids=[f"{recipe}-{edit.__name__}" for recipe, edit in CASES])
def test_consistent_mistake_is_found_by_the_source(
    recipe: str, edit: Edit, tiny_quantized: Quantized, tiny_source: Path, editable: Callable[[Path], Path]
) -> None:
    editor = Editor(editable(tiny_quantized(recipe)))
    with editor.tensors() as tensors:
        name = edit(tensors)
    assert verify(editor.directory).ok  # otherwise the test would prove nothing about `against`
    report = verify(editor.directory, tiny_source)
    assert report.exit_code == 1
    found = [finding for finding in report.findings if finding.tensor == name]
    assert [finding.id for finding in found] == ["against.mismatch"], report.lines()
    assert len([f for f in report.findings if f.level == "error"]) <= 9  # and nothing that is right is accused


def test_seed_of_another_run(tiny_w4a8: Path, tiny_source: Path, editable: Callable[[Path], Path]) -> None:
    editor = Editor(editable(tiny_w4a8))
    with editor.json(PROVENANCE) as provenance:
        provenance["seed"] = 7
    report = verify(editor.directory, tiny_source)
    assert {f.id for f in report.findings} == {"against.rotation", "against.skipped"}


def test_config_changed(tiny_w4a8: Path, tiny_source: Path, editable: Callable[[Path], Path]) -> None:
    """A lost or changed key (rope_theta, index_skip_topk_offset) gives fluent text from another model."""
    editor = Editor(editable(tiny_w4a8))
    with editor.json("config.json") as config:
        config["rope_parameters"]["rope_theta"] = 1e6
    (finding,) = verify(editor.directory, tiny_source).findings
    assert (finding.id, finding.level, finding.file) == ("against.config", "error", "config.json")
    assert "rope_parameters" in finding.message


def test_another_model(tiny_w4a8: Path, tmp_path: Path) -> None:
    report = verify(tiny_w4a8, write_tiny_model(tmp_path / "other", seed=5))
    wrong_modules = {f.tensor for f in report.findings if f.id == "against.mismatch"}
    assert {f"{UP}.weight", f"{DOWN}.weight", "model.embed_tokens.weight"} <= wrong_modules
    smaller = verify(tiny_w4a8, write_tiny_model(tmp_path / "smaller", n_routed_experts=2))
    assert [f.id for f in smaller.findings] == ["against.config"]


@pytest.mark.parametrize("recipe", ["w4a8", "w8a8", "w4a8-mlapo", "rtn-w4a8"])
def test_outlier_weights_are_no_false_alarm(tiny_quantized: Quantized, tmp_path: Path, recipe: str) -> None:
    """One weight 100 times its row makes min-max steps coarse by right; dead channels and rows stay dead."""
    source = write_tiny_model(tmp_path / "outliers")
    shard = source / "model-00001-of-00001.safetensors"
    tensors = load_file(shard)
    for name in (f"{UP}.weight", f"{DOWN}.weight", f"{ATTENTION}q_b_proj.weight"):
        tensors[name][3, 5] = 30.0
    tensors[f"{EXPERT}3.up_proj.weight"][4] = 0
    tensors[f"{EXPERT}3.down_proj.weight"][:] = 0
    tensors[f"{LAYER}input_layernorm.weight"][9] = 0
    save_file(tensors, shard)
    report = verify(tiny_quantized(recipe, source), source)
    assert report.ok, "\n".join(report.lines())
    json.dumps(report.to_json(), allow_nan=False)
