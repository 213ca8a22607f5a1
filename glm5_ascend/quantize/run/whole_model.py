"""All tensors of the output, in order: what is outside the layers first, then layer by layer."""

from __future__ import annotations

from pathlib import Path

import safetensors.torch

from glm5_ascend.files.written import make_folder, write_file
from glm5_ascend.model.rotation import Rotations
from glm5_ascend.model.spec import Linear
from glm5_ascend.quantize.calibration.dataset import CalibrationSet
from glm5_ascend.quantize.plan import ROT_NAME
from glm5_ascend.quantize.run.job import ROTATION_FILE, QuantizedLayer, RunContext
from glm5_ascend.quantize.run.journal import GLOBALS, UnitRecord, WorkUnit
from glm5_ascend.quantize.run.layer import LayerQuantizer
from glm5_ascend.quantize.run.residual_streams import ResidualStreams


def write_tensors(run: RunContext, calibration: CalibrationSet | None) -> list[QuantizedLayer]:
    """Do everything the journal does not have yet, and finish the shards."""
    numbers = range(run.plan.config.num_layers_with_mtp)
    if not len(run.journal):
        run.progress("embedding and head", 0, len(numbers))
    _write_globals(run)
    for layer in numbers:
        run.accept_written(layer)
    with ResidualStreams(run, calibration) as streams:
        finished = [_quantize_layer(run, streams, layer) for layer in numbers]
    run.store.writer.finish()
    return finished


def _quantize_layer(run: RunContext, streams: ResidualStreams, layer: int) -> QuantizedLayer:
    """Quantize one layer, unless a stopped run has."""
    if WorkUnit.layer(layer) in run.journal:
        return QuantizedLayer.of(run, layer)
    finished = LayerQuantizer(run, layer, streams.of(layer)).run()
    streams.layer_done()
    run.progress(finished.in_words(), layer + 1, run.plan.config.num_layers_with_mtp)
    return finished


def _write_globals(run: RunContext) -> None:
    """Embedding, head, final norm, and the two matrices that tell the engine of the rotation."""
    plan, weights, writer = run.plan, run.weights, run.store.writer
    names = run.global_names()
    if GLOBALS in run.journal:
        writer.expect_no_more(*names)
        return
    gains = weights.gains("", plan.config.spec.global_weights)
    for part in plan.config.spec.global_weights:
        if isinstance(part, Linear):
            run.write_table("", part, gains)
        else:
            run.store.write("", part, weights.load("", part, gains))
    if weights.rotations is not None:
        rot = weights.rotations.mtp_rotation(gains["model.norm"])
        writer.write(ROT_NAME, rot.to(plan.source.dtype("model.norm.weight")))
        _write_global_rotation(writer.directory, weights.rotations)
    run.store.sync(names)
    run.journal.finish(GLOBALS, UnitRecord(checksum=run.checksum(GLOBALS)))


def _write_global_rotation(work: Path, rotations: Rotations) -> None:
    data = safetensors.torch.save({"global_rotation": rotations.global_rotation().cpu()})
    make_folder((work / ROTATION_FILE).parent)
    write_file(work / ROTATION_FILE, data)
