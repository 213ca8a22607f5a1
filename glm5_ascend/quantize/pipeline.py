"""From a checked job to the finished checkpoint: the order of all steps."""

from __future__ import annotations

import resource
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from glm5_ascend.checkpoint import schemes
from glm5_ascend.checkpoint.output import (
    PROVENANCE_NAME,
    check_output,
    copy_serving_files,
    file_facts,
    publish,
    run_dir_of,
)
from glm5_ascend.checkpoint.types import GIB, ROT_FILE, ROT_NAME
from glm5_ascend.checkpoint.workers import Workers
from glm5_ascend.checkpoint.writer import ShardWriter, write_json
from glm5_ascend.files.written import copy_file, write_file
from glm5_ascend.model.rotation import Rotations
from glm5_ascend.quantize.job import PreparedJob, check_space
from glm5_ascend.quantize.model_card import CARD, CONFIGURATION, card_files
from glm5_ascend.quantize.progress import Progress, silent
from glm5_ascend.quantize.provenance import RECIPE_NAME, identity, provenance, write_provenance
from glm5_ascend.quantize.run.journal import Journal
from glm5_ascend.quantize.run.run_dir import (
    ACTIVATIONS,
    CHECKPOINT,
    JOURNAL,
    check_only_known_files,
    clear,
    open_run_dir,
    output_files,
)
from glm5_ascend.quantize.run.source_weights import FloatWeights
from glm5_ascend.quantize.run.store import QuantizedLayer, Store
from glm5_ascend.quantize.run.whole_model import write_tensors


@dataclass(frozen=True)
class QuantizeResult:
    seconds: float
    peak_rss_bytes: int
    layers: list[QuantizedLayer]


def quantize(job: PreparedJob, progress: Progress = silent) -> QuantizeResult:
    """Run a prepared job, or resume a stopped run of the same job.

    OUT appears when everything is on disk, or not at all; until then the files lie in `run_dir_of(OUT)`.

    Raises:
        OutputError: among others, another program has put files at OUT meanwhile; the run can be resumed.
    """
    began = time.monotonic()
    check_space(job)
    run_dir = run_dir_of(job.out)
    with torch.no_grad(), open_run_dir(run_dir, job.restart):
        layers = _work(job, run_dir, progress)
        check_output(job.source.directory, job.out, job.overwrite)  # somebody may have put files there meanwhile
        publish(run_dir / CHECKPOINT, job.out)
    return QuantizeResult(time.monotonic() - began, _peak_rss(), layers)


def _peak_rss() -> int:
    """Peak memory of this process in bytes; `ru_maxrss` would count the process that started it as well."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _work(job: PreparedJob, run_dir: Path, progress: Progress) -> list[QuantizedLayer]:
    checkpoint, activations = run_dir / CHECKPOINT, run_dir / ACTIVATIONS
    journal = Journal(run_dir / JOURNAL, identity(job.inputs, job.source))
    recipe = job.plan.recipe
    rotations = Rotations(job.source.config, job.seed, job.device) if recipe.rotates else None
    weights = FloatWeights(job.source, rotations, job.device)
    try:
        writer = ShardWriter(
            checkpoint, job.plan.outputs(), int(recipe.spec.save[0].part_file_size * GIB), {ROT_NAME: ROT_FILE}
        )
        with closing(writer), Workers(job.threads) as workers:
            store = Store(job.plan, writer, journal)
            files = output_files(job.plan, writer.files)
            layers = write_tensors(weights, store, workers, activations, job.calibration, progress)
    except BaseException:
        if not len(journal):  # nothing to resume: leave nothing
            clear(run_dir)
        raise
    finally:
        journal.close()
    copy_serving_files(job.source.directory, job.source.raw, checkpoint)
    copy_file(job.recipe_path, checkpoint / RECIPE_NAME)
    write_json(checkpoint / schemes.DESCRIPTION_NAME, job.plan.description())
    check_only_known_files(checkpoint, files)
    _describe(job, checkpoint, layers, files)
    return layers


def _describe(job: PreparedJob, checkpoint: Path, layers: list[QuantizedLayer], files: list[str]) -> None:
    """Write the model card, and last of all the provenance with the hash of every file."""
    content = provenance(job.inputs, [*job.notes, *job.warnings], layers)
    others = [name for name in files if name not in (PROVENANCE_NAME, CARD, CONFIGURATION)]
    outputs = file_facts(checkpoint, others)
    for name, text in card_files(job.plan, content, outputs).items():
        write_file(checkpoint / name, text)
    write_provenance(checkpoint, content, files, outputs | file_facts(checkpoint, [CARD, CONFIGURATION]))
