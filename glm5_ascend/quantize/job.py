"""A quantization job: source, recipe, plan and output directory, checked before a byte is written."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from glm5_ascend.checkpoint.checks.source import check_source
from glm5_ascend.checkpoint.output import check_output, run_dir_of
from glm5_ascend.checkpoint.source import Source, open_source
from glm5_ascend.checkpoint.workers import cores
from glm5_ascend.checkpoint.writer import check_free_space
from glm5_ascend.model.device import ON_HOST, find_device
from glm5_ascend.model.rotation import Rotations
from glm5_ascend.quantize.calibration.dataset import CalibrationSet, calibration_text, load_calibration
from glm5_ascend.quantize.estimate.memory import RunPrediction, disk_bytes, peak_bytes, threads_within
from glm5_ascend.quantize.estimate.time import seconds
from glm5_ascend.quantize.options import QuantizeOptions, parse_size
from glm5_ascend.quantize.plan import QuantizationPlan
from glm5_ascend.quantize.provenance import inputs
from glm5_ascend.quantize.recipe import Recipe, find_recipe, load_recipe
from glm5_ascend.quantize.selector import without_effect


@dataclass(frozen=True)
class PreparedJob:
    """A checked job: nothing has been written yet.

    Attributes:
        calibration: None if the recipe decides nothing by data. tokens: what the options ask for at most.
        inputs: everything the output's bytes depend on, for the provenance.
        notes, warnings: for the screen and the provenance; warnings name input that has no effect.
    """

    source: Source
    out: Path
    recipe_path: Path
    plan: QuantizationPlan
    calibration: CalibrationSet | None
    tokens: int
    seq_len: int
    seed: int
    device: torch.device
    threads: int
    overwrite: bool
    restart: bool
    inputs: dict[str, Any]
    notes: list[str]
    warnings: list[str]

    @property
    def calibration_tokens(self) -> int:
        return 0 if self.calibration is None else self.calibration.tokens


def open_job(options: QuantizeOptions) -> PreparedJob:
    """Open the source and the recipe that `options` name, and check the job; raises as `prepare` does."""
    recipe_path = find_recipe(options.recipe)
    recipe = load_recipe(recipe_path)
    return prepare(open_source(Path(options.source)), recipe, recipe_path, options)


def prepare(source: Source, recipe: Recipe, recipe_path: Path, options: QuantizeOptions) -> PreparedJob:
    """Check source, plan, calibration text and output directory.

    Raises:
        Glm5Error: the first thing that would make the run fail; nothing has been written.
    """
    max_ram = parse_size(options.max_ram, "--max-ram") or psutil.virtual_memory().total // 2
    device, out = find_device(options.device, ("npu", "cuda")), Path(options.out)
    check_source(source)
    check_output(source.directory, out, options.overwrite)
    plan = QuantizationPlan(source, recipe)
    if recipe.rotates:
        Rotations(source.config, options.seed)  # sizes without a Hadamard matrix are refused here
    threads = threads_within(plan, options.seq_len, options.threads or cores(), max_ram)
    calibration: CalibrationSet | None = None
    notes, warnings = _notes(plan, device), without_effect(recipe, source.config)
    if plan.last_calibrated_layer >= 0:
        texts, note = calibration_text(recipe, options.calib)
        calibration = load_calibration(
            texts, source.directory, source.config.vocab_size, options.samples, options.seq_len
        )
        notes += [note] * bool(note)
    elif options.calib is not None:
        warnings.append(f"--calib {options.calib}: not read, because this recipe decides nothing by calibration text")
    return PreparedJob(
        source=source,
        out=out,
        recipe_path=recipe_path,
        plan=plan,
        calibration=calibration,
        tokens=options.samples * options.seq_len,
        seq_len=options.seq_len,
        seed=options.seed,
        device=device,
        threads=threads,
        overwrite=options.overwrite,
        restart=options.restart,
        inputs=inputs(source, options.recipe, recipe_path, options.seed, device.type, calibration),
        notes=notes,
        warnings=warnings,
    )


def check_space(prepared: PreparedJob) -> None:
    """Refuse a disk that is too small for the output and the activations."""
    needed = prepared.plan.output_bytes + disk_bytes(prepared.plan, prepared.tokens)
    allocated = sum(path.lstat().st_blocks * 512 for path in run_dir_of(prepared.out).rglob("*"))  # by a stopped run
    check_free_space(Path(os.path.realpath(prepared.out)).parent, needed - allocated)


def predict(prepared: PreparedJob) -> RunPrediction:
    """Time, memory and disk that the job will need; measures this machine's rates for some seconds."""
    plan, tokens, seq_len, threads = prepared.plan, prepared.tokens, prepared.seq_len, prepared.threads
    return RunPrediction(
        seconds=seconds(plan, tokens, seq_len, threads),
        threads=threads,
        peak_rss_bytes=peak_bytes(plan, seq_len, threads),
        output_bytes=plan.output_bytes,
        activation_bytes=disk_bytes(plan, tokens),
        source_bytes=prepared.source.files.nbytes,
    )


def _notes(plan: QuantizationPlan, device: torch.device) -> list[str]:
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
    return notes
