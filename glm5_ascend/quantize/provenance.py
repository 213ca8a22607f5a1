"""Where a checkpoint came from: enough to make it again. No timestamps, so equal runs give equal bytes."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path
from typing import Any

import torch

import glm5_ascend
from glm5_ascend.checkpoint.output import PROVENANCE_NAME
from glm5_ascend.checkpoint.source import SourceCheckpoint
from glm5_ascend.checkpoint.writer import write_json
from glm5_ascend.quantize.calibration import CalibrationSet
from glm5_ascend.quantize.layer import LayerReport
from glm5_ascend.quantize.options import QuantizeOptions

RECIPE_NAME = "glm5_ascend_recipe.yaml"


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def provenance(
    source: SourceCheckpoint,
    recipe_path: Path,
    options: QuantizeOptions,
    calibration: CalibrationSet | None,
    reports: list[LayerReport],
) -> dict[str, Any]:
    """The content of the provenance file, without its list of files."""
    return {
        "format_version": 1,
        "tool": {"name": "glm5-ascend", "version": glm5_ascend.__version__},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "machine": {"arch": platform.machine(), "cpu_capability": torch.backends.cpu.get_cpu_capability()},
        "command": options.command,
        "seed": options.seed,
        "recipe": {"name": options.recipe, "sha256": sha256(recipe_path)},
        "source": {
            "path": str(options.source),
            "config_sha256": sha256(source.directory / "config.json"),
            "shards_sha256": {name: sha256(source.directory / name) for name in sorted(source.files.shards)},
        },
        "calibration": None
        if calibration is None
        else {
            "file": calibration.path.name,
            "sha256": sha256(calibration.path),
            "sequences": len(calibration.sequences),
            "tokens": calibration.tokens,
            "forward": "float",
        },
        "layers": [
            {"layer": r.layer, "cold_experts": r.cold_experts, "relative_weight_error": r.relative_errors()}
            for r in reports
        ],
    }


def file_list(directory: Path) -> list[str]:
    """Everything we wrote, so that --overwrite knows what is ours."""
    found = [p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file()]
    return sorted([*found, PROVENANCE_NAME])


def write_provenance(directory: Path, content: dict[str, Any], files: list[str]) -> None:
    write_json(directory / PROVENANCE_NAME, content | {"files": files})
