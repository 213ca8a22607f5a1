"""Predicted memory of an evaluation, counted from shapes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from glm5_ascend.fidelity.evaluation.head import ROWS
from glm5_ascend.fidelity.evaluation.stored_layer import BLOCK_WEIGHTS
from glm5_ascend.fidelity.evaluation.stored_model import ATTENTION, MLP, VOCABULARY_BLOCK, StoredModel
from glm5_ascend.model.memory import FP32, forward_bytes, linear_values
from glm5_ascend.quantize.estimate.memory import IMPORTS


def peak_bytes(models: Sequence[StoredModel], windows: Sequence[torch.Tensor], threads: int) -> int:
    """Predicted peak RSS of a comparison of two models, or the run of one, on windows of one length.

    Streams and selections of all models, and one half of a layer of one, or a block of the head in each thread.
    """
    c, length = models[0].config, len(windows[0])
    tokens = len(windows) * length
    streams = FP32 * tokens * (len(models) * c.stream_width + 2 * c.hidden_size)
    selections = (len(models) + 1) * tokens * length
    seen = tokens if not c.n_routed_experts else tokens * c.num_experts_per_tok // c.n_routed_experts
    expert = 2 * FP32 * (BLOCK_WEIGHTS + seen * (c.hidden_size + 2 * c.moe_intermediate_size))
    head = FP32 * VOCABULARY_BLOCK * (len(models) * c.hidden_size + 3 * ROWS)
    halves = [
        FP32 * linear_values(c, layer, half) + threads * forward_bytes(c, length)
        for layer in range(c.num_hidden_layers)
        for half in (ATTENTION, MLP)
    ]
    return IMPORTS + streams + selections + max(*halves, threads * expert, threads * head)
