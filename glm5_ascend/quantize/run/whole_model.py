"""All tensors of the output, in order: those outside the layers first, then layer by layer; or the rest of them."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import safetensors.torch

from glm5_ascend.checkpoint.types import ROT_NAME
from glm5_ascend.checkpoint.workers import Workers
from glm5_ascend.files.written import make_folder, write_file
from glm5_ascend.model.spec import Linear
from glm5_ascend.quantize.calibration.dataset import CalibrationSet
from glm5_ascend.quantize.calibration.forward import output_checksum
from glm5_ascend.quantize.progress import RESUMING, Progress
from glm5_ascend.quantize.run.journal import GLOBALS, UnitRecord, WorkUnit
from glm5_ascend.quantize.run.layer import LayerQuantizer, write_table
from glm5_ascend.quantize.run.residual_streams import ResidualStreams
from glm5_ascend.quantize.run.source_weights import FloatWeights
from glm5_ascend.quantize.run.store import ROTATION_FILE, QuantizedLayer, Store


def write_tensors(
    weights: FloatWeights,
    store: Store,
    workers: Workers,
    folder: Path,
    calibration: CalibrationSet | None,
    progress: Progress,
) -> list[QuantizedLayer]:
    """Do everything the journal does not have yet, and finish the shards.

    Args:
        folder: for the calibration's activations.
    """
    plan, layers = store.plan, range(store.plan.config.num_layers_with_mtp)
    _discard_corrupt_units(store, workers, folder, progress)
    if not len(store.journal):
        progress("embedding and head", 0, len(layers))
    _write_globals(weights, store, workers)
    for layer in layers:
        store.accept_written(layer)
    streams = ResidualStreams(plan, weights, store.journal, workers, folder, calibration)
    for layer in layers:
        if WorkUnit.layer(layer) not in store.journal:
            LayerQuantizer(weights, store, workers, layer, streams.around(layer), progress).run()
            streams.layer_done()
            progress(str(store.report(layer)), layer + 1, len(layers))
    store.writer.finish()
    return [store.report(layer) for layer in layers]


def _write_globals(weights: FloatWeights, store: Store, workers: Workers) -> None:
    plan, writer = store.plan, store.writer
    if GLOBALS in store.journal:
        writer.expect_no_more(*store.tensor_names(GLOBALS))
        return
    parts = plan.config.global_weights
    gains = weights.gains("", parts)
    for weight in parts:
        if isinstance(weight, Linear):
            write_table(weights, store, workers, "", weight, gains)
        else:
            store.write("", weight, weights.load("", weight, gains))
    if weights.rotations is not None:
        rot = weights.rotations.mtp_rotation(gains[plan.config.spec.final_norm])
        writer.write_rows(ROT_NAME, 0, rot.to(plan.source.dtype(f"{plan.config.spec.final_norm}.weight")))
        path = writer.directory / ROTATION_FILE
        make_folder(path.parent)
        write_file(path, safetensors.torch.save({"global_rotation": weights.rotations.global_rotation().cpu()}))
    store.finish(GLOBALS, UnitRecord(checksum=store.checksum(GLOBALS)))


def _discard_corrupt_units(store: Store, workers: Workers, folder: Path, progress: Progress) -> None:
    """Read back every unit in the journal and remove those whose bytes are not the recorded ones.

    The weights of a layer need its input stream, of which only the last one exists: where a finished layer has to be
    done again, or that stream is damaged, the calibration restarts at the embedding; intact weights stay.
    """
    plan, journal = store.plan, store.journal
    if not len(journal):
        return
    layers = range(plan.config.num_layers_with_mtp)
    progress(f"{RESUMING}: reading back {len(journal)} finished units", 0, len(layers))
    of_layer = {layer: store.units(layer) for layer in layers}
    written = [unit for unit in (GLOBALS, *chain(*of_layer.values())) if unit in journal]
    intact = {unit for unit, same in zip(written, workers.map(store.is_intact, written), strict=True) if same}
    whole = {layer for layer in layers if WorkUnit.layer(layer) in journal and intact.issuperset(of_layer[layer])}
    last = plan.last_calibrated_layer
    done = [layer for layer in range(last + 1) if WorkUnit.layer(layer) in journal]
    restart = bool(done) and (done != list(range(len(done))) or not whole.issuperset(done))
    if not restart and done and done[-1] < last:
        main = min(done[-1], plan.config.num_hidden_layers - 1)  # MTP layers read the output of the main model
        restart = output_checksum(plan.config, folder, main) != journal.record(WorkUnit.layer(main)).checksum
    if restart:
        whole -= set(range(last + 1))
    journal.keep([*(unit for unit in written if unit in intact), *map(WorkUnit.layer, sorted(whole))])
    text = f"{RESUMING}: {len(whole)} of {len(layers)} layers are done"
    if lost := len(written) - len(intact):
        text += f"; {lost} units are damaged and are done again"
    if restart:
        text += "; the calibration restarts at the embedding"
    progress(text, len(whole), len(layers))
