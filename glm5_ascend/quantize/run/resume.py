"""Resuming a stopped run: its journal is compared with the bytes on disk, and damaged units are done again."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

from glm5_ascend.checkpoint.workers import Workers
from glm5_ascend.quantize.calibration.forward import output_checksum
from glm5_ascend.quantize.progress import RESUMING, Progress
from glm5_ascend.quantize.run.journal import GLOBALS, WorkUnit
from glm5_ascend.quantize.run.store import Store


def discard_corrupt_units(store: Store, workers: Workers, folder: Path, progress: Progress) -> None:
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
