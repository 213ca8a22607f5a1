"""From source directory to finished checkpoint: the order of everything, and nothing else."""

from __future__ import annotations

import resource
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import safetensors.torch
import torch

from glm5_ascend.checkpoint import schemes
from glm5_ascend.checkpoint import structure as S
from glm5_ascend.checkpoint.output import atomic_directory, check_output, copy_serving_files
from glm5_ascend.checkpoint.source import SourceCheckpoint
from glm5_ascend.checkpoint.writer import ShardWriter, check_free_space, disk_error, write_json
from glm5_ascend.errors import RecipeError
from glm5_ascend.model import layers as M
from glm5_ascend.quantize.calibration import CalibrationSet, default_calibration_file, load_calibration
from glm5_ascend.quantize.layer import FloatLayer, LayerQuantizer, LayerReport, read_parts
from glm5_ascend.quantize.options import QuantizeOptions
from glm5_ascend.quantize.plan import GIB, ROT_NAME, Plan
from glm5_ascend.quantize.provenance import RECIPE_NAME, file_list, provenance, write_provenance
from glm5_ascend.quantize.recipe import Recipe, find_recipe, load_recipe
from glm5_ascend.quantize.rotation import Rotations
from glm5_ascend.quantize.transforms import Tensors, fuse_norms, gains_of, rotate


class Progress(Protocol):
    """Where progress goes; the command line draws it, tests ignore it."""

    def begin(self, layers: int, experts: int) -> None: ...
    def expert(self, layer: int, expert: int) -> None: ...
    def layer(self, report: LayerReport) -> None: ...


@dataclass(frozen=True)
class Prepared:
    """A checked job: nothing has been written yet."""

    options: QuantizeOptions
    recipe_path: Path
    recipe: Recipe
    source: SourceCheckpoint
    plan: Plan
    output_bytes: int


@dataclass
class Result:
    """What a finished run reports."""

    out: Path
    output_bytes: int
    source_bytes: int
    seconds: float
    peak_rss_bytes: int
    calibration_tokens: int
    reports: list[LayerReport] = field(default_factory=list)


def prepare(options: QuantizeOptions) -> Prepared:
    """Check source, recipe, plan, output place and disk space.

    Raises:
        Glm5Error: the first thing that would make the run fail; nothing has been written.
    """
    recipe_path = find_recipe(options.recipe)
    recipe = load_recipe(recipe_path)
    source = SourceCheckpoint(options.source)
    check_output(options.source, options.out, options.overwrite)
    plan = Plan(source, recipe)
    total = sum(tensor.nbytes for tensor in plan.outputs())
    if recipe.rotates:
        total += 4 * source.config.hidden_size**2  # optional/quarot.safetensors
        Rotations(source.config, options.seed)  # sizes without a Hadamard matrix are refused here
    check_free_space(options.out.resolve().parent, total)
    return Prepared(options, recipe_path, recipe, source, plan, total)


def quantize(job: Prepared, progress: Progress) -> Result:
    """Run a prepared job. OUT appears when everything is on disk, or not at all."""
    began = time.monotonic()
    options, plan = job.options, job.plan
    calibration = _calibration(job)
    with torch.no_grad(), atomic_directory(options.out) as work:
        shard_bytes = int(job.recipe.spec.save[0].part_file_size * GIB)
        writer = ShardWriter(work, plan.outputs(), shard_bytes)
        try:
            reports = _write_tensors(job, calibration, writer, work, progress)
            writer.finish()
        finally:
            writer.close()
        copy_serving_files(options.source, work)
        try:
            shutil.copyfile(job.recipe_path, work / RECIPE_NAME)
        except OSError as error:
            raise disk_error(work, error) from None
        write_json(work / schemes.DESCRIPTION_NAME, description(plan))
        write_provenance(work, provenance(job.source, job.recipe_path, options, calibration, reports), file_list(work))
    return Result(
        out=options.out,
        output_bytes=job.output_bytes,
        source_bytes=sum(e.end - e.start for e in job.source.files.entries.values()),
        seconds=time.monotonic() - began,
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        calibration_tokens=calibration.tokens if calibration else 0,
        reports=reports,
    )


def _calibration(job: Prepared) -> CalibrationSet | None:
    if job.plan.last_calibrated_layer < 0:
        return None
    o, dataset = job.options, job.recipe.spec.dataset
    path = o.calib or (default_calibration_file() if dataset == "default" else Path(dataset))
    if not path.is_file():
        raise RecipeError(f"{path}: no such calibration file", "give one with --calib, or set dataset: default")
    return load_calibration(path, o.source, job.source.config.vocab_size, o.samples, o.seq_len)


def _write_tensors(
    job: Prepared, calibration: CalibrationSet | None, writer: ShardWriter, work: Path, progress: Progress
) -> list[LayerReport]:
    source, config = job.source, job.source.config
    rotations = Rotations(config, job.options.seed) if job.recipe.rotates else None
    tensors = read_parts(source, "", S.GLOBAL)
    final_gain = tensors["model.norm.weight"].clone()
    _transform_globals(tensors, rotations)
    embedding = tensors["model.embed_tokens.weight"]
    for part in S.GLOBAL:
        name = S.tensor_name(part)
        writer.write(name, tensors[name].to(torch.float32 if part.role == "norm" else source.dtype(name)))
    final_norm = tensors["model.norm.weight"]
    del tensors
    quantizer = LayerQuantizer(job.plan, rotations, writer.write, progress.expert)
    if calibration is not None:
        quantizer.start([embedding[sequence] for sequence in calibration.sequences])
    progress.begin(config.num_layers_with_mtp, config.n_routed_experts)
    reports = []
    for layer in range(config.num_layers_with_mtp):
        mtp_inputs = None
        if config.is_mtp(layer) and calibration is not None:
            mtp_inputs = _mtp_inputs(job, rotations, calibration, quantizer, final_norm, final_gain)
        reports.append(quantizer.run(layer, mtp_inputs))
        progress.layer(reports[-1])
    if rotations is not None:
        writer.write(ROT_NAME, rotations.mtp_rotation(final_gain).to(source.dtype("model.norm.weight")))
        _write_global_rotation(work, rotations)
    return reports


def _transform_globals(tensors: Tensors, rotations: Rotations | None) -> None:
    if rotations is not None:
        fuse_norms(tensors, S.GLOBAL, gains_of(tensors, S.GLOBAL))
        rotate(tensors, S.GLOBAL, rotations)


def _mtp_inputs(
    job: Prepared, rotations: Rotations | None, calibration: CalibrationSet, quantizer: LayerQuantizer,
    final_norm: torch.Tensor, final_gain: torch.Tensor,
) -> Callable[[FloatLayer], list[torch.Tensor]]:  # fmt: skip
    """The MTP layer reads the main model's normalised output at i and the embedding of token i+1."""
    config = job.source.config

    def inputs(weights: FloatLayer) -> list[torch.Tensor]:
        rot = rotations.mtp_rotation(final_gain) if rotations is not None else None
        table = weights.tensors["embed_tokens.weight"]
        found = []
        for hidden, sequence in zip(quantizer.hidden, calibration.sequences, strict=True):
            normed = M.rms_norm(hidden, final_norm, config.rms_norm_eps)
            if rot is not None:
                normed = normed @ rot.T  # what the engine's `rot` linear does
            found.append(M.mtp_input(config, weights, table[sequence[1:]], normed[:-1]))
        return found

    return inputs


def _write_global_rotation(work: Path, rotations: Rotations) -> None:
    data = safetensors.torch.save({"global_rotation": rotations.global_rotation()})
    try:
        (work / "optional").mkdir()
        (work / "optional" / "quarot.safetensors").write_bytes(data)
    except OSError as error:
        raise disk_error(work, error) from None


def description(plan: Plan) -> dict[str, object]:
    """Content of quant_model_description.json: one type per tensor, then the meta keys."""
    entries: dict[str, object] = {t.name: t.scheme for t in plan.outputs() if t.scheme is not None}
    static = schemes.W8A8 in entries.values()
    entries |= {"model_quant_type": schemes.W8A8 if static else schemes.W8A8_DYNAMIC} | schemes.DESCRIPTION_META
    if plan.recipe.rotates:
        entries["is_rot_used"] = True
        entries["optional"] = {"quarot": {"rotation_map": {"global_rotation": "optional/quarot.safetensors"}}}
    return entries
