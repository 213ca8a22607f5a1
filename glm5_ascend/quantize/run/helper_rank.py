"""What the ranks behind the first do: their share of each layer's routed experts."""

from __future__ import annotations

import torch

from glm5_ascend.quantize.calibration.forward import Routed, partial_stream
from glm5_ascend.quantize.calibration.row_file import RowFile, Stream
from glm5_ascend.quantize.run.layer import Job, LayerQuantizer, unit


def help_with_experts(job: Job, calibrated: bool) -> None:
    """Follow rank 0 through the layers.

    Args:
        calibrated: whether this run calibrates at all.
    """
    config, last = job.plan.config, job.plan.last_calibrated_layer
    for layer in range(config.num_layers_with_mtp):
        if unit(layer) in job.journal.done or not config.is_moe(layer):
            continue
        quantizer = LayerQuantizer(job, layer, None, None, None)
        job.ranks.meet()
        if not calibrated or layer > last:
            quantizer.experts(None)
        else:
            _calibrated(job, quantizer, wants_stream=layer < last and not config.is_mtp(layer))
        job.ranks.meet()


def _calibrated(job: Job, quantizer: LayerQuantizer, wants_stream: bool) -> None:
    weight, ids = torch.load(job.folder / "routing.pt", weights_only=True)
    hidden = job.plan.config.hidden_size
    with RowFile(job.folder / "expert-inputs", len(ids), hidden, torch.float32, keep=True) as inputs:
        out = Stream(partial_stream(job.folder, job.ranks.rank), (len(ids),), hidden) if wants_stream else None
        quantizer.experts(Routed(inputs, out, weight, ids))
        if out is not None:
            out.file.close()
