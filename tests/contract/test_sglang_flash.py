"""SGLang 0.5.23's real loader takes our GLM-5.3-Flash, and its parameters hold what our files mean.

Covered: target with vision tower, MTP draft, one rank, before and after post-processing. Not covered: any forward
(linear attention and pooled indexer are kernels of a GPU or NPU), several ranks.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.contract.support.loaded import Checkpoint
from tests.contract.support.sglang import SGLang, error_of, require
from tests.contract.support.sglang_loaded import SGLangModel, check_parameters, models
from tests.support.tiny_flash import with_floats, write_tiny_flash
from tests.support.tiny_model import edited_json
from tests.verify.support.editor import Checkpoint as Editor

pytestmark = pytest.mark.contract
CASES = ("flash-w4a8", "flash-w8a8")
KEYS = ("first_k_dense_replace", "mhc", "kda_layers")
ONE_NAME = "types under the tensors' names only"
LAYERS = "model.language_model.layers."
DESCRIPTION = "quant_model_description.json"


@pytest.fixture(scope="module")
def checkpoints(tiny_quantized: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    source = with_floats(write_tiny_flash(tmp_path_factory.mktemp("flash") / "source"))
    return {recipe: tiny_quantized(recipe, source) for recipe in CASES}


@pytest.fixture(scope="module")
def results(sglang: SGLang, checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder per checkpoint, written by one process that imports SGLang once."""
    folder = tmp_path_factory.mktemp("sglang-flash")
    one_name = Path(shutil.copytree(checkpoints["flash-w4a8"], folder / "one-name"))
    with edited_json(one_name / DESCRIPTION) as described:
        for key in [key for key in described if key.startswith("model.layers.")]:
            del described[key]
    jobs = checkpoints | {ONE_NAME: one_name} | {key: without(key, checkpoints, folder) for key in KEYS}
    sglang.run([{"do": "load", "checkpoint": path, "out": folder / name} for name, path in jobs.items()], folder)
    return {name: folder / name for name in jobs}


def without(key: str, checkpoints: dict[str, Path], folder: Path) -> Path:
    """A copy whose config.json lacks a key of `text_config`, or of its linear_attn_config."""
    out = Path(shutil.copytree(checkpoints["flash-w4a8"], folder / f"no-{key}"))
    with edited_json(out / "config.json") as config:
        config["text_config"].pop(key, None)
        config["text_config"]["linear_attn_config"].pop(key, None)
    return out


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_holds_what_the_file_means(
    case: str, checkpoints: dict[str, Path], results: dict[str, Path]
) -> None:
    """Also the numbers that are left after post-processing."""
    loaded = models(require(results[case]), checkpoints[case])
    check_parameters(loaded)
    for name, model in loaded.items():
        processed = model.compare_processed()
        assert processed.different == set() and len(processed.equal) >= (2 if name == "draft" else 30)


@pytest.mark.parametrize("case", CASES)
def test_every_module_gets_the_scheme_of_its_type(
    case: str, checkpoints: dict[str, Path], results: dict[str, Path]
) -> None:
    report = json.loads((require(results[case]) / "report.json").read_text())
    described = json.loads((checkpoints[case] / DESCRIPTION).read_text())
    assert [report[model]["quantization"] for model in ("target", "draft")] == ["modelslim", None]
    schemes = report["target"]["schemes"]
    dense = {key.removesuffix(".weight") for key in described if key.startswith("model.layers.")}
    dense = {key for key in dense if described[f"{key}.weight"] == "W8A8_DYNAMIC" and ".experts." not in key}
    assert schemes.keys() == {key.replace("gate_proj", "gate_up_proj") for key in dense if "up_proj" not in key}
    assert set(schemes.values()) == {"ModelSlimW8A8Int8"} and not report["draft"]["schemes"]
    assert "Unsupported Linear modelslim scheme: [''] in layer: model" not in (results[case] / "log.txt").read_text()


def test_without_its_names_the_start_ends(results: dict[str, Path]) -> None:
    """`verify --engine sglang` says it before (`engine.names`)."""
    error = error_of(results[ONE_NAME])
    assert error is not None and "Missing ModelSlim MoE quantization description for layer model.layers.1.mlp" in error


def test_what_it_builds_without_keys_that_transformers_leaves_out(results: dict[str, Path]) -> None:
    """`verify --engine sglang` says it before (`engine.config`): two of the three start, and are another model."""
    assert "KeyError: 'kda_layers'" in str(error_of(results["kda_layers"]))
    names = {key: load_file(require(results[key]) / "target-before.safetensors").keys() for key in ("mhc", KEYS[0])}
    assert not any("hc_" in name for name in names["mhc"])  # one residual stream
    experts = {name.split(".")[2] for name in names["first_k_dense_replace"] if ".experts." in name}
    assert experts == {"3"}  # layers 1 and 2 became dense


def test_another_file_is_found(checkpoints: dict[str, Path], results: dict[str, Path], tmp_path: Path) -> None:
    """The negative control of the comparison."""
    editor = Editor(Path(shutil.copytree(checkpoints["flash-w4a8"], tmp_path / "other")))
    changed = ("0.self_attn.k_conv1d.weight", "2.hc_ffn_fn", "2.mlp.experts.1.down_proj.weight")
    editor.store({LAYERS + name: torch.flip(editor.read(LAYERS + name), (0,)) for name in changed})
    model = SGLangModel(Checkpoint(editor.directory), require(results["flash-w4a8"]), "target")
    assert model.compare_parameters()[0].different == {
        "model.layers.0.self_attn.qkv_conv1d.weight", "model.layers.2.hc_ffn_fn", "model.layers.2.mlp.experts.w2_weight"
    }  # fmt: skip
    assert model.compare_processed().different == {"model.layers.2.mlp.experts.w2_weight"}
