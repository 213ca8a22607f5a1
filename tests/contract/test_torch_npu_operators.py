"""`quantize --device npu` uses no operator that torch_npu lacks: names from a real run, asked of the real torch_npu."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from glm5_ascend.deploy.rehearsal.environment import RehearsalEnvironment
from tests.support.command import ROOT, said
from tests.support.tiny_model import SHARED_INDEXER, write_calibration, write_tiny_model

pytestmark = pytest.mark.contract
DEVICE = ROOT / "tests/quantize/support/python_device.py"


@pytest.mark.parametrize("recipe", ["w4a8", "w8a8"])
def test_every_operator_of_the_quantizer_exists(recipe: str, vllm_ascend: RehearsalEnvironment, tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "source", **SHARED_INDEXER)
    calib, names, out = write_calibration(tmp_path / "calib.jsonl"), tmp_path / "names", tmp_path / "report.json"
    said(sys.executable, DEVICE, source, tmp_path / "out", recipe, calib, names)
    asked = json.loads(names.read_text())
    assert len(asked) > 30
    names.write_text(json.dumps([*asked, "aten::_linalg_eigh"]))  # one it really lacks shows that the question works
    vllm_ascend.run("vllm_ascend_on_cpu.schemas", ROOT / "kernels", names, out)
    assert json.loads(out.read_text())["missing"] == ["aten::_linalg_eigh"]
