"""A quantization job: source, recipe, plan and output directory, checked before a byte is written."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from glm5_ascend.checkpoint.checks.source import check_source
from glm5_ascend.checkpoint.output import Stamps, check_output, file_stamps, run_dir_of
from glm5_ascend.checkpoint.source import Source, open_source
from glm5_ascend.checkpoint.workers import cores
from glm5_ascend.checkpoint.writer import check_free_space
from glm5_ascend.model.device import ON_HOST, find_device
from glm5_ascend.model.rotation import Rotations
from glm5_ascend.quantize.calibration.dataset import CalibrationSet, calibration_text, load_calibration
from glm5_ascend.quantize.estimate.memory import RunPrediction, disk_bytes, peak_bytes, threads_within
from glm5_ascend.quantize.estimate.time import seconds, source_bytes
from glm5_ascend.quantize.options import QuantizeOptions, Quantizer, parse_size
from glm5_ascend.quantize.plan import QuantizationPlan
from glm5_ascend.quantize.progress import Progress, silent
from glm5_ascend.quantize.provenance import require_kernels
from glm5_ascend.quantize.recipe import Recipe, find_recipe, load_recipe
from glm5_ascend.quantize.selector import without_effect


@dataclass(frozen=True)
class PreparedJob:
    """A checked job: nothing has been written yet."""

    options: QuantizeOptions
    out: Path
    recipe_path: Path
    recipe: Recipe
    source: Source
    plan: QuantizationPlan
    output_bytes: int
    threads: int
    max_ram: int
    device: torch.device
    calibration_file: Path | None
    notes: list[str]  # for the screen and the provenance
    warnings: list[str]  # the same: input that has no effect
    replaced: Stamps  # files in OUT that `--overwrite` may remove, as they were when they were checked


def prepare(options: QuantizeOptions, progress: Progress = silent) -> PreparedJob:
    """Check source, recipe, plan and output directory.

    Raises:
        Glm5Error: the first thing that would make the run fail; nothing has been written.
    """
    max_ram = parse_size(options.max_ram, "--max-ram")
    device = find_device(options.compute_device, ("npu", "cuda"))
    require_kernels(device.type)
    recipe_path = find_recipe(options.recipe)
    recipe = load_recipe(recipe_path)
    source = open_source(Path(options.source))
    check_source(source)
    layers = source.config.num_layers_with_mtp
    out = Path(options.out)
    replaced = file_stamps(out)
    check_output(source.directory, out, options.overwrite, lambda text: progress(text, 0, layers))
    plan = QuantizationPlan(source, recipe)
    if plan.last_calibrated_layer >= 0:
        source.config.require("calibration")
    if Quantizer(options.engine) is Quantizer.msmodelslim:
        source.config.require("--engine msmodelslim")
    if recipe.rotates:
        Rotations(source.config, options.seed)  # sizes without a Hadamard matrix are refused here
    max_ram = max_ram or psutil.virtual_memory().total // 2
    threads = threads_within(plan, options.seq_len, options.threads or cores(), max_ram)
    dataset, note = (None, "") if plan.last_calibrated_layer < 0 else calibration_text(recipe, options.calib)
    return PreparedJob(
        options, out, recipe_path, recipe, source, plan, plan.output_bytes, threads, max_ram, device,
        dataset, _notes(plan, note, device), _warnings(plan, options), replaced,
    )  # fmt: skip


def check_space(prepared: PreparedJob) -> None:
    """Refuse a disk that is too small for the output and the activations.

    Raises:
        OutputError: how much is needed and how much there is.
    """
    options = prepared.options
    needed = prepared.output_bytes + disk_bytes(prepared.plan, options.samples * options.seq_len)
    allocated = sum(path.lstat().st_blocks * 512 for path in run_dir_of(prepared.out).rglob("*"))  # by a stopped run
    check_free_space(Path(os.path.realpath(prepared.out)).parent, needed - allocated)


def predict(prepared: PreparedJob) -> RunPrediction:
    """Time, memory and disk that the job will need; measures this machine's rates for some seconds."""
    options, tokens = prepared.options, prepared.options.samples * prepared.options.seq_len
    return RunPrediction(
        seconds(prepared.plan, tokens, options.seq_len, prepared.threads),
        prepared.threads,
        peak_bytes(prepared.plan, options.seq_len, prepared.threads),
        prepared.output_bytes,
        disk_bytes(prepared.plan, tokens),
        source_bytes(prepared.source),
    )


def calibration_of(prepared: PreparedJob) -> CalibrationSet | None:
    """The token sequences of a job; None if its recipe decides nothing by data."""
    if prepared.calibration_file is None:
        return None
    o = prepared.options
    return load_calibration(
        prepared.calibration_file, prepared.source.directory, prepared.source.config.vocab_size, o.samples, o.seq_len
    )


def _warnings(plan: QuantizationPlan, options: QuantizeOptions) -> list[str]:
    warnings = [f"recipe: {sentence}" for sentence in without_effect(plan.recipe, plan.config)]
    if options.calib is not None and plan.last_calibrated_layer < 0:
        warnings.append(f"--calib {options.calib}: not read, because this recipe decides nothing by calibration text")
    return warnings


def _notes(plan: QuantizationPlan, of_dataset: str, device: torch.device) -> list[str]:
    source, notes = plan.source, []
    if plan.recipe.spec.fallback is not None:
        notes.append("the recipe's rules for fall-backs were not applied: quantize with what analyze --out writes")
    if device.type != "cpu":
        notes.append(f"on {device}; on the host stay " + "; ".join(f"{what} ({why})" for what, why in ON_HOST.items()))
    if renamed := source.names.renamed:
        name, stored = next(iter(renamed.items()))
        notes.append(f"{len(renamed)} weights are read under other names, such as {stored} for {name}")
    if source.unlisted:
        notes.append(f"the MTP layer comes from {', '.join(source.unlisted)}, which the index does not list")
    return notes + [of_dataset] * bool(of_dataset)
