"""`glm5-ascend rehearse` with vllm-ascend's real code: a sound checkpoint at real sizes, and faults that it must name.

Hollow checkpoints: GLM-5's real widths and 256 experts, few layers, no bytes. Rank 0 of the profile's world.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.tools.make_model import write_hollow
from glm5_ascend.checkpoint.index import INDEX_NAME, CheckpointDir
from glm5_ascend.deploy.rehearsal.environment import RehearsalEnvironment
from tests.support.command import glm5_ascend, made_model
from tests.support.tiny_model import change_json

pytestmark = pytest.mark.contract
DESCRIPTION = "quant_model_description.json"
Tensors = dict[str, torch.Tensor]
#: Per cent by which the planner's parameters may be off.
TOLERANCE = 0.1


@pytest.fixture(scope="module")
def hollow(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Checkpoints by recipe with headers only: four layers (one dense) and the MTP layer."""
    folders: dict[str, Path] = {}

    def of(recipe: str) -> Path:
        if recipe not in folders:
            sizes = ["--preset", "real", "--layers", "4", "--dense", "1", "--experts", "256", "--mtp", "1"]
            if recipe.startswith("flash"):  # KDA three times, DSA, KDA
                sizes = ["--preset", "flash", "--layers", "5", "--dense", "1", "--mtp", "1"]
            folder = tmp_path_factory.mktemp("hollow") / recipe
            folders[recipe] = made_model(folder, "--recipe", recipe, *sizes)
        return folders[recipe]

    return of


def rehearsed(
    vllm_ascend: RehearsalEnvironment, checkpoint: Path, profile: str, *extra: str, ranks: str = "0", role: str = ""
) -> dict[str, Any]:
    words = ["--profile", profile, "--ranks", ranks, "--json"]
    words += ["--role", role] if role else []
    done = glm5_ascend(
        "rehearse",
        str(checkpoint),
        *words,
        *(["--", *extra] if extra else []),
        GLM5_REHEARSAL=str(vllm_ascend.python.parents[1]),
    )
    assert done.stdout, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == answer["exit_code"]
    return answer


def changed(
    source: Path, out: Path, tensors: Callable[[Tensors], Tensors], words: dict[str, Any] | None = None
) -> Path:
    """A copy with other tensors, in one file; `words` go into config.json."""
    out.mkdir()
    for path in source.iterdir():
        if path.is_dir():
            shutil.copytree(path, out / path.name)
        elif path.suffix != ".safetensors" and path.name != INDEX_NAME:
            shutil.copy(path, out / path.name)
    entries = CheckpointDir(source).entries.values()
    remaining = tensors({entry.name: torch.empty(entry.shape, dtype=entry.dtype, device="meta") for entry in entries})
    write_hollow(remaining, out / "model.safetensors")
    change_json(out / "config.json", **(words or {}))
    return out


def without(*endings: str, layer: str = "") -> Callable[[Tensors], Tensors]:
    """Leave out tensors with these endings; `layer` is a part of their names."""

    def change(tensors: Tensors) -> Tensors:
        return {name: t for name, t in tensors.items() if layer not in name or not name.endswith(endings)}

    return change


def problems(answer: dict[str, Any]) -> str:
    assert not answer["ok"], "nothing was found"
    if "error" in answer:  # refused before vllm-ascend is asked
        return str(answer["error"]["message"])
    return "\n".join(line for rank in answer["ranks"] for line in rank["problems"])


@pytest.mark.parametrize(
    ("recipe", "profile", "role", "rank"),
    [("w4a8", "a3-single-w4a8", "server", "15"), ("w8a8", "a3-pd", "decode", "31")],
)
def test_a_sound_checkpoint_is_taken_whole(
    vllm_ascend: RehearsalEnvironment, hollow: Callable[[str], Path], recipe: str, profile: str, role: str, rank: str
) -> None:
    answer = rehearsed(vllm_ascend, hollow(recipe), profile, ranks=rank, role=role)
    assert answer["ok"], problems(answer)
    (only,) = answer["ranks"]
    assert only["rank"] == int(rank) and set(only["models"]) == {"target", "draft"}
    assert abs(only["differences"]["parameters"]) < TOLERANCE
    assert only["differences"]["cache"] == 0
    assert only["cached_tokens"] > 0 and only["resident_bytes"] > only["parameter_bytes"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--additional-config", '{"enable_dsa_cp": true}'], "DSA CP requires SP"),
        (["--kv-cache-dtype", "int8"], "--kv-cache-dtype is 'int8'"),  # C8 as later versions spell it
        (["--tensor-parallel-size", "12"], "12"),  # it does not divide 64 heads
    ],
)
def test_flags_that_this_version_does_not_take(
    vllm_ascend: RehearsalEnvironment, hollow: Callable[[str], Path], flags: list[str], message: str
) -> None:
    assert message in problems(rehearsed(vllm_ascend, hollow("w4a8"), "a3-single-w4a8", *flags))


def halved(tensors: Tensors) -> Tensors:
    name = "model.layers.1.self_attn.o_proj.weight"
    return tensors | {name: tensors[name][: tensors[name].shape[0] // 2]}


def float_experts(tensors: Tensors) -> Tensors:
    """Described as quantized."""
    changed = without("weight_scale", "weight_offset", "scale_bias", layer=".layers.2.mlp.experts.")(tensors)
    for name in changed:
        if ".layers.2.mlp.experts." in name:
            shape = (6144, 2048) if "down" in name else (2048, 6144)
            changed[name] = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    return changed


@pytest.mark.parametrize(
    ("recipe", "change", "config", "word"),
    [
        ("w8a8", without("layers.2.self_attn.o_proj.input_scale"), {}, "layers.2.self_attn.o_proj.input_scale"),
        ("w4a8", without("layers.4.eh_proj.weight"), {}, "eh_proj"),
        ("w4a8", without("layers.3.mlp.experts.7.down_proj.weight"), {}, "layers.3.mlp.experts"),
        ("w4a8", halved, {}, "layers.1.self_attn.o_proj"),
        ("w4a8", float_experts, {}, "layers.2.mlp.experts"),
        # The file has an indexer in all four. 0.23.0 reads `indexer_types` only of layers that the pattern skips.
        ("w4a8", without(), {"indexer_types": ["full", "shared", "full", "full"], "index_topk_pattern": "FSFF"},
         "layers.1.self_attn.indexer"),
    ],
    ids=["input_scale", "MTP head", "an expert", "a shape", "float experts", "indexer types"],
)  # fmt: skip
def test_faults_of_a_checkpoint(
    vllm_ascend: RehearsalEnvironment, hollow: Callable[[str], Path], tmp_path: Path, recipe: str,
    change: Callable[[Tensors], Tensors], config: dict[str, Any], word: str,
) -> None:  # fmt: skip
    broken = changed(hollow(recipe), tmp_path / "broken", change, config)
    assert word in problems(rehearsed(vllm_ascend, broken, f"a3-single-{recipe}"))


@pytest.mark.parametrize(
    ("recipe", "profile", "rank"), [("flash-w4a8", "a2-single-flash", "7"), ("flash-w8a8", "a3-single-flash", "15")]
)
def test_a_rank_of_flash_is_taken_whole(
    vllm_ascend_030: RehearsalEnvironment, hollow: Callable[[str], Path], recipe: str, profile: str, rank: str
) -> None:
    """Weights, pages of the caches and states of linear attention are the planner's."""
    answer = rehearsed(vllm_ascend_030, hollow(recipe), profile, ranks=rank)
    assert answer["ok"], problems(answer)
    (only,) = answer["ranks"]
    assert set(only["models"]) == {"target", "draft"}
    assert abs(only["differences"]["parameters"]) < TOLERANCE
    assert only["differences"]["cache"] == 0 and only["differences"]["state"] == 0


def test_the_pre_release_takes_it(vllm_ascend_030: RehearsalEnvironment, hollow: Callable[[str], Path]) -> None:
    answer = rehearsed(vllm_ascend_030, hollow("w4a8"), "a3-single-w4a8")
    assert answer["ok"], problems(answer)
    assert answer["versions"]["vllm-ascend"] == "0.30.0rc2"
    (only,) = answer["ranks"]
    assert abs(only["differences"]["parameters"]) < TOLERANCE  # PROLOG_V3's copies are planned, too


@pytest.mark.parametrize("line", ["vllm_ascend", "vllm_ascend_030"])
def test_int8_indexer_keys_that_no_layer_has(
    line: str, hollow: Callable[[str], Path], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Layers are marked by a word that neither version knows: both keep bf16 keys and say nothing."""
    broken = changed(hollow("w4a8"), tmp_path / "broken", without())
    other = {f"model.layers.{layer}.self_attn.indexer.quant_type": "ANOTHER" for layer in range(4)}
    change_json(broken / DESCRIPTION, **other)
    extra = ["--additional-config", '{"enable_sparse_li_c8": true}']
    answer = rehearsed(request.getfixturevalue(line), broken, "a3-single-w4a8", *extra)
    assert "int8 indexer keys are requested, but no layer has them" in problems(answer)


def test_switches_of_the_first_line_that_the_pre_release_overwrites(
    vllm_ascend_030: RehearsalEnvironment, hollow: Callable[[str], Path]
) -> None:
    extra = ["--additional-config", '{"enable_sparse_sfa_c8": true}']
    answer = rehearsed(vllm_ascend_030, hollow("w4a8"), "a3-single-w4a8", *extra)
    assert "int8 latents are requested, but no layer has them" in problems(answer)
