"""A stopped run: what its journal says is compared with the bytes on disk, and what differs is done again."""

from __future__ import annotations

from itertools import chain

from glm5_ascend.quantize.calibration.dataset import CalibrationSet
from glm5_ascend.quantize.progress import RESUMING
from glm5_ascend.quantize.run.job import RunContext
from glm5_ascend.quantize.run.journal import GLOBALS, WorkUnit
from glm5_ascend.quantize.run.residual_streams import behind


def forget_damaged(run: RunContext, calibration: CalibrationSet | None) -> None:
    """Read back every unit in the journal and forget those whose bytes are not the recorded ones.

    The weights of a layer need its input stream, of which only the last one exists: where a finished layer has to be
    done again, or that stream is damaged, the calibration starts again at the embedding; weights that are sound stay.
    """
    if not len(run.journal):
        return
    layers = range(run.plan.config.num_layers_with_mtp)
    run.progress(f"{RESUMING}: reading back {len(run.journal)} finished units", 0, len(layers))
    of_layer = {layer: list(run.units(layer)) for layer in layers}
    written = [unit for unit in (GLOBALS, *chain(*of_layer.values())) if unit in run.journal]
    sound = {unit for unit, same in zip(written, run.workers.map(run.as_recorded, written), strict=True) if same}
    whole = {layer for layer in layers if WorkUnit.layer(layer) in run.journal and sound.issuperset(of_layer[layer])}
    last = run.plan.last_calibrated_layer
    calibrated = range(last + 1)
    done = [layer for layer in calibrated if WorkUnit.layer(layer) in run.journal]
    again = bool(done) and (done != list(range(len(done))) or not whole.issuperset(done))
    if not again and done and done[-1] < last and calibration is not None:
        main = min(done[-1], run.plan.config.num_hidden_layers - 1)  # MTP layers read the stream behind the main model
        again = behind(run, main, calibration) != run.journal.record(WorkUnit.layer(main)).checksum
    if again:
        whole -= set(calibrated)
    run.journal.keep([*(unit for unit in written if unit in sound), *map(WorkUnit.layer, sorted(whole))])
    _report(run, len(written) - len(sound), again, len(whole))


def _report(run: RunContext, lost: int, again: bool, done: int) -> None:
    total = run.plan.config.num_layers_with_mtp
    text = f"{RESUMING}: {done} of {total} layers are done"
    if lost:
        text += f"; {lost} units are not as they were written and are done again"
    if again:
        text += "; the calibration starts again at the embedding"
    run.progress(text, done, total)
