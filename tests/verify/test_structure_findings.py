"""What verify will refuse can be asked before anything is written: functions of parsed JSON, without torch."""

from __future__ import annotations

import subprocess
import sys

from glm5_ascend.checkpoint.checks.config_keys import config_findings
from glm5_ascend.model.config import ModelConfig
from glm5_ascend.model.config_file import parse_config
from glm5_ascend.verify.description_meta import meta_findings
from tests.support.command import ROOT
from tests.support.tiny_model import SHARED_INDEXER, tiny_config

GOOD = {"version": "1.0.0", "group_size": 0, "model_quant_type": "W8A8_DYNAMIC"}


def config(**changes: object) -> ModelConfig:
    return parse_config(tiny_config(**changes), ROOT / "config.json")


def test_a_good_config_gives_nothing() -> None:
    assert config_findings(tiny_config()) == config_findings(tiny_config(**SHARED_INDEXER)) == []


def test_indexer_types_alone() -> None:
    """The engine would let the layer compute: hours of quantizing for a checkpoint that verify refuses."""
    raw = tiny_config(indexer_types=["full", "full", "shared"])
    assert [finding.id for finding in config_findings(raw)] == ["config.indexer_schedule"]


def test_meta_keys() -> None:
    types = {"FLOAT", "W8A8_DYNAMIC", "W4A8_DYNAMIC"}
    assert meta_findings(GOOD, types, config()) == []
    assert [finding.id for finding in meta_findings({}, types, config())] == [
        "description.version", "description.group_size", "description.model_quant_type",
    ]  # fmt: skip
    assert [finding.id for finding in meta_findings(GOOD, {"FLOAT", "W8A8"}, config())] == [
        "description.model_quant_type"
    ]


def test_no_torch_is_loaded() -> None:
    modules = "glm5_ascend.checkpoint.checks.config_keys, glm5_ascend.verify.description_meta"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
