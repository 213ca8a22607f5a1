"""`--engine msmodelslim`: the same recipe and texts through an installed msModelSlim, the official tool.

Its CLI runs in its own process (importing it patches torch). It writes into the run directory, never into SRC or OUT:
26.1.0 deletes every *.safetensors of its save path before it starts, and with SRC as save path the source is gone.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

from glm5_ascend.checkpoint.output import PROVENANCE_NAME, exclusive, run_dir_of
from glm5_ascend.checkpoint.tokenizer import SourceTokenizer
from glm5_ascend.checkpoint.writer import write_json
from glm5_ascend.errors import CheckFailedError, MissingEnvironmentError
from glm5_ascend.model.config import ModelConfig
from glm5_ascend.quantize.calibration.dataset import CalibrationSet
from glm5_ascend.quantize.job import PreparedJob
from glm5_ascend.quantize.methods.gptq import GPTQ
from glm5_ascend.quantize.model_card import CARD, CONFIGURATION
from glm5_ascend.quantize.pipeline import describe, publish_result
from glm5_ascend.quantize.provenance import inputs, provenance
from glm5_ascend.quantize.recipe import Recipe
from glm5_ascend.quantize.selector import symbols

PROGRAM, TITLE = "msmodelslim", "msModelSlim"
MODEL_TYPE = "GLM-5"


def stock_recipe(recipe: Recipe, config: ModelConfig, dataset: Path) -> dict[str, Any]:
    """A recipe as msModelSlim reads it: defaults written out, numbers instead of symbols, only its keys and methods."""
    raw = recipe.model_dump(mode="json", exclude_none=True)
    numbers = symbols(config)

    def expand(pattern: str) -> list[str]:
        for symbol, layers in numbers.items():
            if f"{{{symbol}}}" in pattern:
                return [name for layer in layers for name in expand(pattern.replace(f"{{{symbol}}}", str(layer)))]
        return [pattern]

    def walk(value: Any) -> Any:
        if isinstance(value, list):
            return [walk(item) for item in value]
        if isinstance(value, dict):
            if value.get("method") == GPTQ.name:  # it has none
                value = value | {"method": "ssz" if value["dtype"] == "int4" else "minmax"}
            return {
                key: [name for pattern in item for name in expand(pattern)]
                if key in ("include", "exclude")
                else walk(item)
                for key, item in value.items()
            }
        return value

    metadata = {key: value for key, value in raw["metadata"].items() if key != "format_version"}
    spec = walk(raw["spec"]) | {"dataset": str(dataset)}
    return {"apiversion": "modelslim_v1", "metadata": {"score": 90, **metadata}, "spec": spec}


def run_msmodelslim(prepared: PreparedJob, calibration: CalibrationSet | None, device: str) -> Path | None:
    """Quantize SRC to OUT with msModelSlim; OUT appears when its process has succeeded.

    Args:
        device: as its own `--device`: "npu", "npu:0,1", "cpu".
    Returns:
        new path of the files that another program has put at OUT meanwhile.
    Raises:
        MissingEnvironmentError: no `msmodelslim` on PATH. CheckFailedError: it ended with an error.
    """
    program = shutil.which(PROGRAM)
    if program is None:
        raise MissingEnvironmentError(
            f"--engine msmodelslim: no program {PROGRAM!r} on PATH",
            "pip install msmodelslim==26.1.0, or leave out --engine",
        )
    source, run_dir = prepared.source.directory, run_dir_of(prepared.out)
    with exclusive(run_dir):
        work, log = run_dir / "checkpoint", run_dir / "msmodelslim.log"
        shutil.rmtree(work, ignore_errors=True)
        texts = run_dir / "calibration.json"
        tokenizer = SourceTokenizer(source)
        sequences = calibration.sequences if calibration is not None else ()
        write_json(texts, [tokenizer.decode(sequence) for sequence in sequences] or ["nothing to calibrate"])
        recipe_file = run_dir / "recipe.yaml"
        raw = stock_recipe(prepared.recipe, prepared.source.config, texts.resolve())
        recipe_file.write_text(yaml.safe_dump(raw, sort_keys=False), encoding="utf-8")
        command = [program, "quant", "--model_type", MODEL_TYPE, "--model_path", source, "--save_path", work]
        command += ["--config_path", recipe_file, "--device", device]
        with log.open("w") as file:
            code = subprocess.run([str(word) for word in command], stdout=file, stderr=file, check=False).returncode
        if code or not any(work.glob("*.safetensors")):
            raise CheckFailedError(f"msmodelslim ended with exit status {code}", f"its output is in {log}")
        _describe(prepared, calibration, work)
        moved_aside = publish_result(prepared, work)
    shutil.rmtree(run_dir, ignore_errors=True)
    return moved_aside


def _describe(prepared: PreparedJob, calibration: CalibrationSet | None, work: Path) -> None:
    described = (CARD, CONFIGURATION, PROVENANCE_NAME)
    for name in described:
        (work / name).unlink(missing_ok=True)
    content = provenance(
        inputs(prepared.source, prepared.recipe_path, prepared.options, calibration),
        [*prepared.notes, *prepared.warnings],
        [],
    )
    del content["seed"], content["versions"], content["machine"]["kernels"]  # of our own rotations and rounding
    files = [path.relative_to(work).as_posix() for path in work.rglob("*") if path.is_file()]
    describe(prepared.plan, work, {**content, "quantizer": TITLE}, sorted([*files, *described]))
