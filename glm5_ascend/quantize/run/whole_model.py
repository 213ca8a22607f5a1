"""All tensors of the output, in order: what is outside the layers first, then layer by layer."""

from __future__ import annotations

from pathlib import Path

import safetensors.torch

from glm5_ascend.checkpoint.writer import disk_error
from glm5_ascend.model import structure
from glm5_ascend.model.rotation import Rotations
from glm5_ascend.model.structure import Linear
from glm5_ascend.quantize.calibration.dataset import CalibrationSet
from glm5_ascend.quantize.plan import ROT_NAME
from glm5_ascend.quantize.run.layer import (
    Job,
    LayerQuantizer,
    LayerReport,
    accept_written,
    report_of,
    unit,
    write_table,
)
from glm5_ascend.quantize.run.residual_streams import Depth

GLOBALS = "globals"  # the unit of work in front of the layers


def write_tensors(job: Job, calibration: CalibrationSet | None) -> list[LayerReport]:
    """Do everything the journal does not have yet, and finish the shards."""
    config = job.plan.config
    layers = range(config.num_layers_with_mtp)
    _write_globals(job, job.store.writer.directory)
    for layer in layers:
        accept_written(job, layer)
    done = sum(unit(layer) in job.journal.done for layer in layers)
    job.progress.begin(len(layers), config.n_routed_experts, done)
    with Depth(job, calibration) as depth:
        reports = [_layer(job, depth, layer) for layer in layers]
    job.store.writer.finish()
    return reports


def _layer(job: Job, depth: Depth, layer: int) -> LayerReport:
    """Quantize one layer, unless a stopped run has."""
    if unit(layer) in job.journal.done:
        return report_of(job, layer)
    report = LayerQuantizer(job, layer, *depth.around(layer)).run()
    depth.leave()
    job.progress.layer(report)
    return report


def _write_globals(job: Job, work: Path) -> None:
    """Embedding, head, final norm, and the two matrices that tell the engine of the rotation."""
    plan, weights, writer = job.plan, job.weights, job.store.writer
    names = [name for part in structure.GLOBAL for name in job.store.names("", part)]
    if weights.rotations is not None:
        names.append(ROT_NAME)
    if GLOBALS in job.journal.done:
        writer.expect_no_more(*names)
        return
    gains = weights.gains("", structure.GLOBAL)
    for part in structure.GLOBAL:
        if isinstance(part, Linear):
            write_table(job, "", part, gains)
        else:
            job.store.write("", part, weights.load("", part, gains))
    if weights.rotations is not None:
        rot = weights.rotations.mtp_rotation(gains["model.norm"])
        writer.write(ROT_NAME, rot.to(plan.source.dtype("model.norm.weight")))
        _write_global_rotation(work, weights.rotations)
    job.store.commit(names, lambda: job.journal.finish(GLOBALS))


def _write_global_rotation(work: Path, rotations: Rotations) -> None:
    data = safetensors.torch.save({"global_rotation": rotations.global_rotation().cpu()})
    try:
        (work / "optional").mkdir(exist_ok=True)
        (work / "optional" / "quarot.safetensors").write_bytes(data)
    except OSError as error:
        raise disk_error(work, error) from None
