"""From a checked job to the finished checkpoint: the order of all steps."""

from __future__ import annotations

import resource
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from glm5_ascend.checkpoint import schemes
from glm5_ascend.checkpoint.output import (
    PROVENANCE_NAME,
    copy_serving_files,
    file_facts,
    file_stamps,
    publish,
    run_dir_of,
)
from glm5_ascend.checkpoint.types import GIB, ROT_FILE, ROT_NAME
from glm5_ascend.checkpoint.workers import Workers
from glm5_ascend.checkpoint.writer import ShardWriter, write_json
from glm5_ascend.files.written import copy_file, write_file
from glm5_ascend.model.rotation import Rotations
from glm5_ascend.quantize.calibration.dataset import CalibrationSet
from glm5_ascend.quantize.estimate.time import source_bytes
from glm5_ascend.quantize.job import PreparedJob, calibration_of, check_space
from glm5_ascend.quantize.model_card import CARD, CONFIGURATION, card_files
from glm5_ascend.quantize.plan import QuantizationPlan
from glm5_ascend.quantize.progress import Progress, silent
from glm5_ascend.quantize.provenance import RECIPE_NAME, identity, inputs, provenance, write_provenance
from glm5_ascend.quantize.run.journal import Journal
from glm5_ascend.quantize.run.resume import discard_corrupt_units
from glm5_ascend.quantize.run.run_dir import (
    ACTIVATIONS,
    CHECKPOINT,
    JOURNAL,
    UnexpectedFileError,
    check_only_known_files,
    clear,
    open_run_dir,
    output_files,
)
from glm5_ascend.quantize.run.source_weights import FloatWeights
from glm5_ascend.quantize.run.store import QuantizedLayer, Store
from glm5_ascend.quantize.run.whole_model import write_tensors


@dataclass
class QuantizeResult:
    """Report of a finished run; `moved_aside`: new path of the files that another program put at `out` meanwhile."""

    out: Path
    output_bytes: int
    source_bytes: int
    seconds: float
    peak_rss_bytes: int
    calibration_tokens: int
    layers: list[QuantizedLayer] = field(default_factory=list)
    moved_aside: Path | None = None

    def to_dict(self) -> dict[str, Any]:
        """Values for `--json`."""
        return {
            "seconds": round(self.seconds, 2),
            "peak_rss_bytes": self.peak_rss_bytes,
            "source_bytes": self.source_bytes,
            "calibration_tokens": self.calibration_tokens,
            "moved_aside": None if self.moved_aside is None else str(self.moved_aside),
            "layers": [layer.to_dict() for layer in self.layers],
        }


def quantize(prepared: PreparedJob, progress: Progress = silent) -> QuantizeResult:
    """Run a prepared job, or resume a stopped run of the same job.

    OUT appears when everything is on disk, or not at all; until then the files lie in `run_dir_of(OUT)`.
    """
    began = time.monotonic()
    check_space(prepared)
    calibration = calibration_of(prepared)
    run_dir = run_dir_of(prepared.out)
    with torch.no_grad(), open_run_dir(run_dir, prepared.options.restart):
        layers = _work(prepared, calibration, run_dir, progress)
        moved_aside = publish_result(prepared, run_dir / CHECKPOINT)
    return QuantizeResult(
        out=prepared.out,
        output_bytes=prepared.output_bytes,
        source_bytes=source_bytes(prepared.source),
        seconds=time.monotonic() - began,
        peak_rss_bytes=_peak_rss(),
        calibration_tokens=calibration.tokens if calibration else 0,
        layers=layers,
        moved_aside=moved_aside,
    )


def publish_result(prepared: PreparedJob, checkpoint: Path) -> Path | None:
    """Rename the finished checkpoint to OUT; files put there meanwhile are moved aside, to the path returned."""
    return publish(checkpoint, prepared.out, keep=file_stamps(prepared.out) != prepared.replaced)


def _peak_rss() -> int:
    """Peak memory of this process in bytes; `ru_maxrss` would count the process that started it as well."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _work(
    prepared: PreparedJob, calibration: CalibrationSet | None, run_dir: Path, progress: Progress
) -> list[QuantizedLayer]:
    options, checkpoint, activations = prepared.options, run_dir / CHECKPOINT, run_dir / ACTIVATIONS
    job_inputs = inputs(prepared.source, prepared.recipe_path, options, calibration)
    journal = Journal(run_dir / JOURNAL, identity(job_inputs, prepared.source))
    rotations = Rotations(prepared.source.config, options.seed, prepared.device) if prepared.recipe.rotates else None
    weights = FloatWeights(prepared.source, rotations, prepared.device)
    shard_bytes = int(prepared.recipe.spec.save[0].part_file_size * GIB)
    try:
        writer = ShardWriter(checkpoint, prepared.plan.outputs(), shard_bytes, {ROT_NAME: ROT_FILE})
        with closing(writer), Workers(prepared.threads) as workers:
            store = Store(prepared.plan, writer, journal)
            files = output_files(prepared.plan, writer.files)
            check_only_known_files(checkpoint, files)
            discard_corrupt_units(store, workers, activations, progress)
            layers = write_tensors(weights, store, workers, activations, calibration, progress)
    except UnexpectedFileError:
        raise
    except BaseException:
        if not len(journal):  # nothing to resume: leave nothing
            clear(run_dir)
        raise
    finally:
        journal.close()
    copy_serving_files(prepared.source.directory, prepared.source.raw, checkpoint)
    copy_file(prepared.recipe_path, checkpoint / RECIPE_NAME)
    write_json(checkpoint / schemes.DESCRIPTION_NAME, prepared.plan.description())
    check_only_known_files(checkpoint, files)
    describe(prepared.plan, checkpoint, provenance(job_inputs, [*prepared.notes, *prepared.warnings], layers), files)
    return layers


def describe(plan: QuantizationPlan, checkpoint: Path, content: dict[str, Any], files: list[str]) -> None:
    """Write the model card, and last of all the provenance with the hash of every file.

    Args:
        content: the provenance. files: names of all files of the checkpoint, with those that this function writes.
    Raises:
        UnexpectedFileError: another card is there.
    """
    others = [name for name in files if name not in (PROVENANCE_NAME, CARD, CONFIGURATION)]
    outputs = file_facts(checkpoint, others)
    for name, text in card_files(plan, content, outputs).items():
        path = checkpoint / name
        if path.exists() and path.read_bytes() != text.encode():  # ours of a stopped run is the same
            raise UnexpectedFileError(
                f"{path}: not written by this run", "move it away, then run the same command again"
            )
        write_file(path, text)
    write_provenance(checkpoint, content, files, outputs | file_facts(checkpoint, [CARD, CONFIGURATION]))
