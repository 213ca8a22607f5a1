"""What the ranks behind the first do: their share of each layer's routed experts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from glm5_ascend.quantize.calibration.forward import Routed, partial_stream
from glm5_ascend.quantize.calibration.row_file import RowFile, Stream
from glm5_ascend.quantize.run.job import RunContext
from glm5_ascend.quantize.run.journal import WorkUnit
from glm5_ascend.quantize.run.layer import LayerQuantizer


def help_with_experts(run: RunContext, calibrated: bool) -> None:
    """Follow rank 0 through the layers.

    Args:
        calibrated: whether this run calibrates at all.
    """
    config, last = run.plan.config, run.plan.last_calibrated_layer
    for layer in range(config.num_layers_with_mtp):
        if WorkUnit.layer(layer) in run.journal or not config.is_moe(layer):
            continue
        quantizer = LayerQuantizer(run, layer, None)
        run.ranks.meet()
        if not calibrated or layer > last:
            quantizer.experts(None)
        else:
            _calibrated(run, quantizer, wants_stream=layer < last and not config.is_mtp(layer))
        run.ranks.meet()


def _calibrated(run: RunContext, quantizer: LayerQuantizer, wants_stream: bool) -> None:
    with opened_routing(run) as routed:
        tokens, hidden = len(routed.ids), run.plan.config.hidden_size
        routed.out = Stream(partial_stream(run.folder, run.ranks.rank), (tokens,), hidden) if wants_stream else None
        quantizer.experts(routed)
        if routed.out is not None:
            routed.out.file.close()


@contextmanager
def opened_routing(run: RunContext) -> Iterator[Routed]:
    """What rank 0 has left of a layer for the others' experts; nobody reads the stream behind it yet."""
    weight, ids = torch.load(run.folder / "routing.pt", weights_only=True)
    hidden = run.plan.config.hidden_size
    with RowFile(run.folder / "expert-inputs", len(ids), hidden, torch.float32, keep=True) as inputs:
        yield Routed(inputs, None, weight, ids)
