"""From source directory to finished checkpoint: the order of everything, and nothing else."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from glm5_ascend.checkpoint import schemes
from glm5_ascend.checkpoint.output import Stamps, check_output, copy_serving_files, publish, workshop
from glm5_ascend.checkpoint.source import SourceCheckpoint
from glm5_ascend.checkpoint.types import ROT_FILE, ROT_NAME
from glm5_ascend.checkpoint.writer import ShardWriter, check_free_space, write_json
from glm5_ascend.errors import OutputError, RecipeError
from glm5_ascend.files.written import copy_file
from glm5_ascend.model.device import ON_HOST, find_device
from glm5_ascend.model.rotation import Rotations
from glm5_ascend.quantize.calibration.dataset import CalibrationSet, Dataset, find_dataset, load_calibration
from glm5_ascend.quantize.description import description
from glm5_ascend.quantize.estimate.memory import RunPrediction, disk_bytes, peak_bytes, threads_within
from glm5_ascend.quantize.estimate.time import seconds, source_bytes
from glm5_ascend.quantize.options import QuantizeOptions
from glm5_ascend.quantize.plan import GIB, QuantizationPlan
from glm5_ascend.quantize.progress import Progress, silent
from glm5_ascend.quantize.provenance import (
    RECIPE_NAME,
    identity,
    inputs,
    provenance,
    require_kernels,
    write_provenance,
)
from glm5_ascend.quantize.recipe import Recipe, find_recipe, load_recipe
from glm5_ascend.quantize.result import QuantizeResult
from glm5_ascend.quantize.run.helper_rank import help_with_experts
from glm5_ascend.quantize.run.job import QuantizedLayer, RunContext
from glm5_ascend.quantize.run.journal import Journal
from glm5_ascend.quantize.run.ranks import Ranks
from glm5_ascend.quantize.run.source_weights import FloatWeights
from glm5_ascend.quantize.run.stopped import forget_damaged
from glm5_ascend.quantize.run.whole_model import write_tensors
from glm5_ascend.quantize.run.writer import Store
from glm5_ascend.quantize.sizes import parse_size
from glm5_ascend.quantize.source_check import check_source
from glm5_ascend.quantize.workers import Workers
from glm5_ascend.quantize.workshop import (
    ACTIVATIONS,
    CHECKPOINT,
    JOURNAL,
    StrangerError,
    clear,
    open_workshop,
    output_files,
    refuse_strangers,
    remove,
)


@dataclass(frozen=True)
class PreparedJob:
    """A checked job: nothing has been written yet."""

    options: QuantizeOptions
    recipe_path: Path
    recipe: Recipe
    source: SourceCheckpoint
    plan: QuantizationPlan
    output_bytes: int
    threads: int
    max_ram: int
    device: torch.device
    calibration_file: Path | None
    notes: list[str]  # what the user should know of, for the screen and the provenance
    replaced: Stamps  # files in OUT that `--overwrite` may remove, as they were when they were checked


def prepare(options: QuantizeOptions, progress: Progress = silent) -> PreparedJob:
    """Check source, recipe, plan and output place.

    Raises:
        Glm5Error: the first thing that would make the run fail; nothing has been written.
    """
    device = find_device(options.compute_device, ("npu", "cuda"))
    require_kernels(device.type)  # what cannot run is said before anything is read
    recipe_path = find_recipe(options.recipe)
    recipe = load_recipe(recipe_path)
    source = SourceCheckpoint(Path(options.source))
    check_source(source)
    layers = source.config.num_layers_with_mtp
    replaced = check_output(
        Path(options.source), Path(options.out), options.overwrite, lambda text: progress(text, 0, layers)
    )
    plan = QuantizationPlan(source, recipe)
    if recipe.rotates:
        Rotations(source.config, options.seed)  # sizes without a Hadamard matrix are refused here
    max_ram = parse_size(options.max_ram, "--max-ram") or psutil.virtual_memory().total // 2 // Ranks().here
    threads = threads_within(
        plan, options.seq_len, options.threads or max(1, len(os.sched_getaffinity(0)) // Ranks().here), max_ram
    )
    dataset = _dataset(options, plan)
    return PreparedJob(
        options, recipe_path, recipe, source, plan, plan.output_bytes, threads, max_ram, device,
        dataset.path if dataset is not None else None, _notes(plan, dataset, device), replaced,
    )  # fmt: skip


def check_space(prepared: PreparedJob) -> None:
    """Refuse a disk that is too small for the output and the activations.

    Raises:
        OutputError: how much is needed and how much there is.
    """
    options = prepared.options
    needed = prepared.output_bytes + disk_bytes(prepared.plan, options.samples * options.seq_len)
    out = Path(options.out)
    check_free_space(out.resolve().parent, needed - _allocated(workshop(out)))


def predict(prepared: PreparedJob) -> RunPrediction:
    """What the job will need; measures this machine's rates for some seconds."""
    options, tokens = prepared.options, prepared.options.samples * prepared.options.seq_len
    return RunPrediction(
        seconds(prepared.plan, tokens, options.seq_len, prepared.threads),
        prepared.threads,
        peak_bytes(prepared.plan, options.seq_len, prepared.threads),
        prepared.output_bytes,
        disk_bytes(prepared.plan, tokens),
        source_bytes(prepared.source),
    )


def _allocated(place: Path) -> int:
    """Bytes of the disk that an unfinished run holds already."""
    return sum(path.lstat().st_blocks * 512 for path in place.rglob("*"))


def quantize(prepared: PreparedJob, progress: Progress = silent) -> QuantizeResult | None:
    """Run a prepared job, or finish it where a stopped run of the same job left off.

    OUT appears when everything is on disk, or not at all; until then the work lies in `workshop(OUT)`.
    Returns None in the helping ranks of a torchrun.
    """
    began = time.monotonic()
    check_space(prepared)
    calibration = calibration_of(prepared)
    place = workshop(Path(prepared.options.out))
    with torch.no_grad(), Ranks() as ranks:
        if ranks.rank:
            _help(prepared, calibration, ranks, place)
            return None
        with open_workshop(place, prepared.options.restart):
            layers = _work(prepared, calibration, ranks, place, progress)
            kept = publish_result(prepared, place / CHECKPOINT)
    return QuantizeResult(
        out=Path(prepared.options.out),
        output_bytes=prepared.output_bytes,
        source_bytes=source_bytes(prepared.source),
        seconds=time.monotonic() - began,
        peak_rss_bytes=_peak_rss(),
        calibration_tokens=calibration.tokens if calibration else 0,
        layers=layers,
        kept=kept,
    )


def publish_result(prepared: PreparedJob, work: Path) -> Path | None:
    """Put the result in its place; what the user has put there meanwhile is kept beside it, at the path returned."""
    options = prepared.options
    try:
        check_output(Path(options.source), Path(options.out), options.overwrite, unchanged=prepared.replaced)
    except OutputError:
        return publish(work, Path(options.out), keep=True)
    return publish(work, Path(options.out))


def _peak_rss() -> int:
    """Peak memory of this process in bytes; `ru_maxrss` would count the process that started it as well."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _work(
    prepared: PreparedJob, calibration: CalibrationSet | None, ranks: Ranks, place: Path, progress: Progress
) -> list[QuantizedLayer]:
    """Everything in `place`, ready to be published."""
    options, work = prepared.options, place / CHECKPOINT
    known = inputs(prepared.source, prepared.recipe_path, options, calibration)
    journal = Journal(place / JOURNAL, identity(known, prepared.source))
    try:
        journal.refresh()
        with _open_run(prepared, work, journal, ranks, progress) as run:
            files = output_files(prepared.plan, run.store.writer.files)
            refuse_strangers(work, files, begins=True)
            forget_damaged(run, calibration)
            ranks.meet()  # the workshop is ready for the others ...
            ranks.meet()  # ... and they have read what is done
            layers = write_tensors(run, calibration)
        ranks.meet()
    except StrangerError:
        raise
    except BaseException:
        if not len(journal):  # nothing to go on from: leave nothing
            clear(place)
            remove(place)
        raise
    finally:
        journal.close()
    copy_serving_files(Path(options.source), work)
    copy_file(prepared.recipe_path, work / RECIPE_NAME)
    write_json(work / schemes.DESCRIPTION_NAME, description(prepared.plan))
    refuse_strangers(work, files)
    write_provenance(work, provenance(known, options, prepared.notes, layers), files)
    return layers


def _help(prepared: PreparedJob, calibration: CalibrationSet | None, ranks: Ranks, place: Path) -> None:
    """A helping rank: its share of the experts, in the workshop that rank 0 has made."""
    ranks.meet()
    known = inputs(prepared.source, prepared.recipe_path, prepared.options, calibration)
    journal = Journal(place / f"journal-{ranks.rank}.jsonl", identity(known, prepared.source))
    try:
        journal.refresh()
        with _open_run(prepared, place / CHECKPOINT, journal, ranks, silent) as run:
            ranks.meet()
            help_with_experts(run, calibration is not None)
        ranks.meet()
    finally:
        journal.close()


@contextmanager
def _open_run(
    prepared: PreparedJob, work: Path, journal: Journal, ranks: Ranks, progress: Progress
) -> Iterator[RunContext]:
    """What the steps of the run share, open."""
    rotations = (
        Rotations(prepared.source.config, prepared.options.seed, prepared.device) if prepared.recipe.rotates else None
    )
    shard_bytes = int(prepared.recipe.spec.save[0].part_file_size * GIB)
    writer = ShardWriter(work, prepared.plan.outputs(), shard_bytes, {ROT_NAME: ROT_FILE})
    try:
        with Workers(prepared.threads) as workers:
            weights, store = FloatWeights(prepared.source, rotations, prepared.device), Store(prepared.plan, writer)
            yield RunContext(
                prepared.plan, weights, store, journal, workers, ranks, progress, work.parent / ACTIVATIONS
            )
    finally:
        writer.close()


def calibration_of(prepared: PreparedJob) -> CalibrationSet | None:
    """The token sequences of a job; None if its recipe decides nothing by data."""
    if prepared.calibration_file is None:
        return None
    o = prepared.options
    return load_calibration(
        prepared.calibration_file, Path(o.source), prepared.source.config.vocab_size, o.samples, o.seq_len
    )


def _dataset(options: QuantizeOptions, plan: QuantizationPlan) -> Dataset | None:
    """The calibration text; None if the recipe decides nothing by data."""
    if plan.last_calibrated_layer < 0:
        return None
    recipe = plan.recipe
    found = find_dataset(recipe.spec.dataset, stock=recipe.apiversion == "modelslim_v1")
    if options.calib is not None:
        found = Dataset(Path(options.calib))
    if not found.path.is_file():
        raise RecipeError(f"{found.path}: no such calibration file", "give one with --calib, or set dataset: default")
    return found


def _notes(plan: QuantizationPlan, dataset: Dataset | None, device: torch.device) -> list[str]:
    source, notes = plan.source, []
    if plan.recipe.spec.fallback is not None:
        notes.append("the recipe's rules for fall-backs were not applied: quantize with what analyze --out writes")
    if device.type != "cpu":
        notes.append(f"on {device}; on the host stay " + "; ".join(f"{what} ({why})" for what, why in ON_HOST.items()))
    if source.unlisted:
        notes.append(f"the MTP layer comes from {', '.join(source.unlisted)}, which the index does not list")
    if dataset is not None and dataset.note:
        notes.append(dataset.note)
    return notes
