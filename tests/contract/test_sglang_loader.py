"""SGLang 0.5.23's real loader takes our checkpoints, and its parameters hold what our files mean.

Covered: detection of the format, its schemes, weight loaders and what it does to weights after loading, for the target
and the MTP draft, on one rank and on two with the experts distributed. Its own limits are shown, too: `verify --engine
sglang` and deploy/upstream/ state them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from glm5_ascend.checkpoint.index import CheckpointDir
from glm5_ascend.quantize.recipe import find_recipe, load_recipe
from glm5_ascend.verify import verify
from tests.contract.support.damage import damage
from tests.contract.support.loaded import Checkpoint
from tests.contract.support.sglang import SGLang, error_of, require
from tests.contract.support.sglang_loaded import SGLangModel, check_parameters, models
from tests.support.command import ROOT
from tests.support.mixed_experts import write_mixed_experts
from tests.support.tiny_model import SHARED_INDEXER, change_json, write_tiny_model

pytestmark = pytest.mark.contract
RECIPES = sorted(path.stem for path in (ROOT / "quant_recipes").glob("*.yaml"))
GLM52 = "glm-5.2"  # w4a8 of a model with indexers shared between layers
MIXED = "mixed experts"  # INT4, and in one layer INT8
CASES = [*RECIPES, GLM52, MIXED]
#: What must not load, or loads and is wrong: by name, with the arguments that show it.
NO_EP, EP, DAMAGED, FLOAT_EXPERTS, INHERITED, UNKNOWN = (
    "tp 2 without ep", "tp 2 with ep", "damaged", "float experts", "inherited", "unknown type",
)  # fmt: skip


@pytest.fixture(scope="module")
def checkpoints(
    tiny_quantized: Callable[..., Path], tiny_source: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sglang-checkpoints")
    quantized = {recipe: tiny_quantized(recipe) for recipe in RECIPES}
    quantized[GLM52] = tiny_quantized("w4a8", write_tiny_model(folder / "glm52", **SHARED_INDEXER))
    quantized[MIXED] = tiny_quantized(str(write_mixed_experts(folder / "mixed.yaml", tiny_source, 2)))
    quantized[DAMAGED] = damage(quantized["w4a8"], folder / "damaged")
    quantized[EP] = quantized[NO_EP] = quantized[INHERITED] = quantized["w4a8"]
    recipe = folder / "float-experts.yaml"
    text = (ROOT / "quant_recipes/rtn-w4a8.yaml").read_text()
    recipe.write_text(
        text.replace('["model.layers.{mtp}.*"]', '["model.layers.{mtp}.*", "model.layers.2.mlp.experts.*"]')
    )
    quantized[FLOAT_EXPERTS] = tiny_quantized(str(recipe))
    quantized[UNKNOWN] = Path(shutil.copytree(quantized["w4a8"], folder / "unknown"))
    unknown = {"model.layers.1.self_attn.o_proj.weight": "W4A8_DYNAMIC"}
    change_json(quantized[UNKNOWN] / "quant_model_description.json", **unknown)
    return quantized


@pytest.fixture(scope="module")
def results(sglang: SGLang, checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder per checkpoint, written by one process that imports SGLang once."""
    folder = tmp_path_factory.mktemp("sglang-loaded")
    jobs: list[dict[str, Any]] = [
        {"do": "load", "checkpoint": path, "out": folder / name} for name, path in checkpoints.items()
    ]
    for job in jobs:
        name = job["out"].name
        if name in (EP, NO_EP):
            job |= {"ranks": 2, "tp_size": 2, "ep_size": 2 if name == EP else 1, "mtp": False}
        if name == INHERITED:
            job |= {"quantization": "modelslim", "speculative_draft_model_quantization": None}
    sglang.run(jobs, folder)
    return {name: folder / name for name in checkpoints}


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_holds_what_the_file_means(
    case: str, checkpoints: dict[str, Path], results: dict[str, Path]
) -> None:
    check_parameters(models(require(results[case]), checkpoints[case]))


@pytest.mark.parametrize("case", CASES)
def test_the_draft_gets_the_rotation(case: str, checkpoints: dict[str, Path], results: dict[str, Path]) -> None:
    files, loaded = CheckpointDir(checkpoints[case]), models(require(results[case]), checkpoints[case])
    report = json.loads((results[case] / "report.json").read_text())
    assert [report[name]["quantization"] for name in ("target", "draft")] == ["modelslim", None]
    assert "rot.weight" not in loaded["target"].after
    actual = loaded["draft"].after.get("model.rot_weight")
    if "rot.weight" in files:
        assert actual is not None and torch.equal(actual, files.read("rot.weight"))
        assert not torch.allclose(actual, torch.eye(len(actual), dtype=actual.dtype), atol=0.01)
    else:
        assert actual is None and not load_recipe(find_recipe(case)).rotates


@pytest.mark.parametrize("rank", [0, 1])
def test_two_ranks_with_their_own_experts(rank: int, checkpoints: dict[str, Path], results: dict[str, Path]) -> None:
    folder = require(results[EP] / f"rank{rank}")
    model = SGLangModel(Checkpoint(checkpoints[EP]), folder, "target", rank, 2)
    parameters, _ = model.compare_parameters()
    assert parameters.different == set() and len(parameters.equal) > 60


def test_without_ep_every_rank_has_the_whole_scale_bias(checkpoints: dict[str, Path], results: dict[str, Path]) -> None:
    """deploy/upstream/sglang-scale-bias.md: with this the rule in deploy/rules.yaml and the advice of verify go."""
    stack = Checkpoint(checkpoints[NO_EP]).stacks("model.layers.1.mlp.experts", set())[1]
    for rank in (0, 1):
        folder = require(results[NO_EP] / f"rank{rank}")
        model = SGLangModel(Checkpoint(checkpoints[NO_EP]), folder, "target", rank, 2)
        actual = model.after["model.layers.1.mlp.experts.w2_scale_bias"].double().reshape(stack["w2_scale_bias"].shape)
        local = 8 * stack["w2_weight"].chunk(2, -1)[rank].sum(-1)
        assert torch.allclose(actual, stack["w2_scale_bias"], rtol=1e-4, atol=1e-6)
        assert float((actual - local).norm() / local.norm()) > 0.5


def test_damage_that_the_loader_does_not_notice_is_found(
    checkpoints: dict[str, Path], results: dict[str, Path]
) -> None:
    """The negative control of the comparison: the damage against the files that it was made from."""
    loaded = models(require(results[DAMAGED]), checkpoints["w4a8"])
    experts, attention = "model.layers.{}.mlp.experts.", "model.layers.0.self_attn."
    different = loaded["target"].compare_parameters()[0].different
    assert different == {
        f"{attention}q_b_proj.weight_scale",
        f"{experts.format(1)}w13_weight",
        f"{experts.format(1)}w2_scale_bias",
        f"{experts.format(2)}w13_weight",
    }
    assert "model.rot_weight" not in loaded["draft"].after


def test_float_experts_end_the_start(checkpoints: dict[str, Path], results: dict[str, Path]) -> None:
    """deploy/upstream/sglang-float-experts.md, and `verify --engine sglang` says it before."""
    error = error_of(results[FLOAT_EXPERTS])
    assert error is not None and "Unsupported ModelSlim MoE schemes for layer model.layers.2.mlp.experts" in error
    (finding,) = verify(checkpoints[FLOAT_EXPERTS], engine="sglang", deep=False).findings
    assert finding.id == "engine.experts" and ".layers.2." in str(finding.tensor)


def test_a_draft_that_inherits_the_quantization_ends_the_start(results: dict[str, Path]) -> None:
    error = error_of(results[INHERITED])
    assert error is not None and "Unsupported ModelSlim MoE schemes" in error and "W13='FLOAT'" in error


def test_an_unknown_type_of_a_linear_is_a_line_of_the_log(
    checkpoints: dict[str, Path], results: dict[str, Path]
) -> None:
    folder = require(results[UNKNOWN])  # it starts
    assert "Unsupported Linear modelslim scheme: ['W4A8_DYNAMIC']" in (folder / "log.txt").read_text()
    ids = {finding.id for finding in verify(checkpoints[UNKNOWN], engine="sglang", deep=False).findings}
    assert "description.not_runnable" in ids
