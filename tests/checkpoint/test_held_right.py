"""Public checkpoints that are right as they are: quantized without a note, verified, and known to doctor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from glm5_ascend.verify import verify
from tests.support.command import in_process, worked
from tests.support.tiny_model import as_hub_cache, write_calibration, write_tiny_model

INDEX = "model.safetensors.index.json"


def as_transformers_4(directory: Path) -> None:
    """Keys of transformers 4: torch_dtype, rope_theta outside, rope_scaling null."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    theta = config.pop("rope_parameters")["rope_theta"]
    config |= {"torch_dtype": config.pop("dtype"), "rope_theta": theta, "rope_scaling": None}
    path.write_text(json.dumps(config | {"transformers_version": "4.57.0"}))


def without_total_size(directory: Path) -> None:
    path = directory / INDEX
    path.write_text(json.dumps({"weight_map": json.loads(path.read_text())["weight_map"]}))


def nothing(directory: Path) -> None:
    pass


CASES: dict[str, tuple[dict[str, object], Callable[[Path], None]]] = {
    "head_dim beside qk_rope_head_dim": ({"head_dim": 24}, nothing),
    "an index without total_size": ({}, without_total_size),
    "links of the hub's cache": ({}, as_hub_cache),
    "a config of transformers 4": ({}, as_transformers_4),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_quantized_and_verified(name: str, tmp_path: Path) -> None:
    keys, change = CASES[name]
    source = write_tiny_model(tmp_path / "models--x--y" / "snapshots" / "0123", **keys)  # type: ignore[arg-type]
    change(source)
    calib, out = write_calibration(tmp_path / "calib.jsonl"), tmp_path / "out"
    done = worked(in_process("quantize", source, out, "--calib", calib, "--samples", "2", "--seq-len", "32", "--json"))
    assert json.loads(done.stdout)["warnings"] == []
    report = verify(out, against=source)
    assert report.ok, report.lines()
    assert [finding.id for finding in report.findings] == (["config.head_dim"] if "head_dim" in name else [])
    assert in_process("serve", source, "--dry-run").returncode == 0
