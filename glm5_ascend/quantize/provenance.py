"""Where a checkpoint came from: enough to make it again. No timestamps, so equal runs give equal bytes."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

import glm5_ascend
from glm5_ascend.checkpoint.output import PROVENANCE_NAME, sha256
from glm5_ascend.checkpoint.source import Source
from glm5_ascend.checkpoint.writer import write_json
from glm5_ascend.errors import printable
from glm5_ascend.model.device import cpu_facts
from glm5_ascend.quantize.calibration.dataset import CalibrationSet
from glm5_ascend.quantize.run.store import QuantizedLayer
from glm5_kernels import ops

#: The kernels that a quantization may use.
_OPS = ("hadamard", "ssz_scale", "fake_round", "round_rows")
_ON_HOST = ("gptq_inverse_factors", "gptq_round")  # whatever the device is
RECIPE_NAME = "glm5_ascend_recipe.yaml"


def _kernels(device: str) -> str:
    """Which implementations round the weights, e.g. "cpu". Raises as `ops.choose` does where one cannot run."""
    pairs = [(op, device) for op in _OPS] + [(op, "cpu") for op in _ON_HOST]
    return " ".join(sorted({ops.choose(op, device).implementation for op, device in pairs}))


def inputs(
    source: Source, recipe: str, recipe_path: Path, seed: int, device: str, calibration: CalibrationSet | None
) -> dict[str, Any]:
    """Everything the output's bytes depend on; `recipe` is the name that the user gave."""
    return {
        "tool": {"name": "glm5-ascend", "version": glm5_ascend.__version__},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "torch_build": torch.version.git_version,
        },
        "machine": cpu_facts() | {"device": device, "kernels": _kernels(device)},
        "seed": seed,
        "recipe": {"name": printable(recipe), "sha256": sha256(recipe_path)},
        "source": {
            "path": printable(str(source.directory)),
            "config_sha256": sha256(source.directory / "config.json"),
            "shards": {
                name: {"bytes": shard.size, "header_sha256": shard.header_sha256}
                for name, shard in sorted(source.files.shards.items())
            },
        },
        "calibration": None
        if calibration is None
        else {
            "file": printable(calibration.path.name),
            "sha256": sha256(calibration.path),
            "sequences": len(calibration.sequences),
            "tokens": calibration.tokens,
            "opening": calibration.opening,
            "forward": "float",
        },
    }


def identity(job_inputs: dict[str, Any], source: Source) -> dict[str, Any]:
    """Identity of a run, which a resumed run must share: the output's `inputs`, and no shard touched since."""
    resolved = job_inputs["source"] | {"path": printable(os.path.realpath(source.directory))}
    stamps = {name: shard.path.stat().st_mtime_ns for name, shard in sorted(source.files.shards.items())}
    return {**job_inputs, "source": resolved, "modification times of the source": stamps}


def provenance(job_inputs: dict[str, Any], notes: list[str], layers: list[QuantizedLayer]) -> dict[str, Any]:
    return {
        "format_version": 1,
        "command": _command_line(),
        **job_inputs,
        "notes": notes,
        "layers": [layer.to_dict() for layer in layers],
    }


def write_provenance(directory: Path, content: dict[str, Any], files: list[str], outputs: dict[str, Any]) -> None:
    """Write the provenance file, last of all; `outputs`: size and hash of every other file, which `verify` compares."""
    write_json(directory / PROVENANCE_NAME, content | {"files": files, "outputs": outputs})


def _command_line() -> str:
    program = Path(sys.argv[0]).name if sys.argv else ""
    if program in ("glm5-ascend", "__main__.py", "-m"):
        return printable(shlex.join(["glm5-ascend", *sys.argv[1:]]))
    return "glm5_ascend.quantize.quantize"
