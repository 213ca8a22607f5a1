"""msModelSlim's recipe files as they are written: anchors, literal layer numbers, its data sets, INT8 caches, MXFP4.

The text here is ours, in its schema; one test reads its own files, from its wheel on PyPI.
"""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from glm5_ascend.checkpoint.source import open_source
from glm5_ascend.errors import RecipeError
from glm5_ascend.quantize.calibration.dataset import load_calibration
from glm5_ascend.quantize.job import open_job
from glm5_ascend.quantize.options import QuantizeOptions
from glm5_ascend.quantize.pipeline import quantize
from glm5_ascend.quantize.plan import QuantizationPlan
from glm5_ascend.quantize.progress import silent
from glm5_ascend.quantize.recipe import load_recipe
from tests.support.tiny_model import write_tiny_model

STOCK = """\
apiversion: modelslim_v1
metadata:
  config_id: stock
  score: 90
  verified_tags: {GLM-5: [[vLLM_Ascend, Atlas_A3_Inference]]}
  label: {w_bit: 4, a_bit: 8, is_sparse: False, kv_cache: True}

default_w4a8_dynamic: &default_w4a8_dynamic
  act: {scope: "per_token", dtype: "int8", symmetric: True, method: "minmax"}
  weight: {scope: "per_channel", dtype: "int4", symmetric: True, method: "ssz"}

spec:
  process:
    - type: "quarot"
      export_extra_info: True
    - type: "fa3_quant"
      qconfig: {dtype: "int8", scope: "per_token", symmetric: True, method: "minmax"}
      include: ["*"]
      exclude: ["model.layers.0.*", "model.layers.78.*"]
    - {type: flex_smooth_quant, enable_subgraph_type: [up-down], include: ["*"]}
    - type: "group"
      configs:
        - type: "linear_quant"
          qconfig: *default_w4a8_dynamic
          include: ["*mlp.experts.*"]
          exclude: ["model.layers.MTP*"]
  dataset: mix_calib.jsonl
  save:
    - type: "ascendv1_saver"
      part_file_size: 4
"""


def test_a_stock_file_runs_unchanged(tiny_source: Path, tmp_path: Path) -> None:
    """Its data set is not installed: the bundled texts are used, and a note says so."""
    recipe, out = tmp_path / "stock.yaml", tmp_path / "out"
    recipe.write_text(STOCK.replace("MTP", "3"))  # the tiny model's MTP layer
    job = open_job(QuantizeOptions(tiny_source, out, str(recipe), samples=2, seq_len=64))
    assert any("mix_calib.jsonl" in note for note in job.notes)
    quantize(job, silent)
    assert json.loads((out / "glm5_ascend_provenance.json").read_text())["notes"] == job.notes + job.warnings
    written = json.loads((out / "quant_model_description.json").read_text())
    assert written["indexer_quant_type"] == "INT8_DYNAMIC"
    marked = {key: word for key, word in written.items() if key.endswith(".indexer.quant_type")}
    assert marked == {f"model.layers.{i}.self_attn.indexer.quant_type": "INT8_DYNAMIC" for i in (1, 2, 3)}
    assert written["model.layers.1.mlp.experts.0.up_proj.weight"] == "W4A8_DYNAMIC"


@pytest.mark.parametrize("layer", ["78", "2"])
def test_foreign_layer_numbers_are_refused(layer: str, tiny_source: Path, tmp_path: Path) -> None:
    path = tmp_path / "stock.yaml"
    path.write_text(STOCK.replace("MTP", layer))
    with pytest.raises(
        RecipeError, match=rf"layers {layer} are named.*the dense layers are 0 and the MTP layers 3"
    ) as e:
        QuantizationPlan(open_source(tiny_source), load_recipe(path))
    assert "{mtp}" in e.value.tip


@pytest.fixture(scope="session")
def msmodelslim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """msModelSlim's package, unpacked and never imported (it patches torch)."""
    folder = tmp_path_factory.mktemp("msmodelslim")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, "msmodelslim==26.1.0"]
    subprocess.run(command, check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder)
    return folder


def test_all_recipes_of_msmodelslim(msmodelslim: Path, tmp_path: Path, tiny_source: Path) -> None:
    """msModelSlim's INT recipes plan a model with GLM-5's 78 layers and MTP layer 78; their data sets are read."""
    source = open_source(write_tiny_model(tmp_path / "source", num_hidden_layers=78, first_k_dense_replace=3))
    files = sorted((msmodelslim / "msmodelslim/lab_practice/glm_5").glob("*.yaml"))
    assert len(files) == 7
    for path in files:
        if "mxfp4" in path.name:
            with pytest.raises(RecipeError, match=r"per_block|mxfp"):
                load_recipe(path)
            continue
        recipe = load_recipe(path)
        assert len(QuantizationPlan(source, recipe).cache_layers()) == (69 if "c8" in path.name else 0)
        dataset = msmodelslim / "msmodelslim/lab_calib" / recipe.spec.dataset
        assert load_calibration(dataset, tiny_source, 320, 4, 64).tokens == 256
