"""What a stopped run has left is taken only as far as it is what its journal says."""

from __future__ import annotations

from collections.abc import Iterator

from glm5_ascend.model import structure
from glm5_ascend.quantize.run.job import RunContext
from glm5_ascend.quantize.run.journal import GLOBALS, WorkUnit
from glm5_ascend.quantize.run.residual_streams import activations_checksum
from glm5_ascend.quantize.run.whole_model import global_names


def forget_damaged(run: RunContext) -> int:
    """Take out of the journal what is not on disk as it says; returns how many units must be done again.

    Only the activations in front of the next layer are kept: where an earlier layer has to be done again, or they are
    damaged themselves, all layers are passed through again, in float and without rounding what is still there.
    """
    journal, layers = run.journal, range(run.plan.config.num_layers_with_mtp)
    damaged = [(layer, unit) for layer, unit, names in _units(run) if _differs(run, unit, names)]
    finished = [WorkUnit.layer(layer) for layer in layers if WorkUnit.layer(layer) in journal]
    last = len(finished) - 1
    intact = not finished or journal.record(finished[last]).checksum == activations_checksum(run, last)
    units = [unit for _, unit in damaged]
    if not intact or any(0 <= layer <= last for layer, _ in damaged):
        units += finished
    if units:
        journal.forget(units)
    return len(units)


def _units(run: RunContext) -> Iterator[tuple[int, WorkUnit, list[str]]]:
    """Every unit that stores tensors: layer (-1 outside of them), unit, names of the tensors."""
    yield -1, GLOBALS, global_names(run)
    for layer in range(run.plan.config.num_layers_with_mtp):
        yield layer, WorkUnit.backbone(layer), run.stored_names(layer, structure.backbone(run.plan.config, layer))
        for expert in run.experts(layer):
            yield layer, WorkUnit.expert(layer, expert), run.stored_names(layer, structure.expert_linears(expert))


def _differs(run: RunContext, unit: WorkUnit, names: list[str]) -> bool:
    return unit in run.journal and run.journal.record(unit).checksum != run.store.writer.checksum(names)
