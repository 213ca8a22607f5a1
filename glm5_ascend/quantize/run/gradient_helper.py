"""What the ranks behind the first do in the sweep for gradients: their share of each layer's routed experts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from glm5_ascend.model import structure
from glm5_ascend.quantize.calibration.dataset import CalibrationSet
from glm5_ascend.quantize.calibration.forward import Routed, partial_stream
from glm5_ascend.quantize.calibration.row_file import Stream
from glm5_ascend.quantize.methods.transforms import Tensors
from glm5_ascend.quantize.run.gradient_experts import ExpertGradients, add_outputs
from glm5_ascend.quantize.run.gradient_files import GradientFiles
from glm5_ascend.quantize.run.helper_rank import opened_routing
from glm5_ascend.quantize.run.job import RunContext
from glm5_ascend.quantize.run.journal import WorkUnit


def help_with_gradients(run: RunContext, calibration: CalibrationSet) -> None:
    """Follow rank 0 through `GradientSweep.sweep`."""
    files = GradientFiles(run, tuple(len(sequence) for sequence in calibration.sequences))
    if WorkUnit.gradient(files.first) in run.journal:
        return
    moe = [layer for layer in range(files.last) if run.plan.config.is_moe(layer)]
    for layer in moe:
        if WorkUnit.streamed(layer) not in run.journal:
            with _shared(run) as routed:
                _forward(run, layer, routed)
    for layer in reversed(moe):
        if layer > files.first and WorkUnit.gradient(layer) not in run.journal:
            with _shared(run) as routed:
                _backward(run, layer, routed, files)


@contextmanager
def _shared(run: RunContext) -> Iterator[Routed]:
    """Between two meetings: what rank 0 has left for the experts."""
    run.ranks.meet()
    with opened_routing(run) as routed:
        yield routed
    run.ranks.meet()


def _forward(run: RunContext, layer: int, routed: Routed) -> None:
    rank, hidden = run.ranks.rank, run.plan.config.hidden_size
    out = Stream(partial_stream(run.folder, rank), (len(routed.ids),), hidden)
    with out.file:
        routed.out = out
        add_outputs(run, layer, _gains(run, layer), routed)


def _backward(run: RunContext, layer: int, routed: Routed, files: GradientFiles) -> None:
    behind = files.gradient(layer + 1)
    with behind.file, ExpertGradients(run.folder, run.ranks.rank, routed.ids, run.plan.config.hidden_size) as own:
        own.add(run, layer, _gains(run, layer), routed, behind.file)


def _gains(run: RunContext, layer: int) -> Tensors:
    prefix = structure.layer_prefix(layer)
    return run.weights.gains(prefix, structure.backbone(run.plan.config, layer))
