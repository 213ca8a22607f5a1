"""Predicted memory of an analysis: the quantizer's, and the probes of a layer's units."""

from __future__ import annotations

import math

from glm5_ascend.model.spec import Linear
from glm5_ascend.quantize.estimate import memory
from glm5_ascend.quantize.plan import QuantizationPlan

_FP32 = 4


def peak_bytes(plan: QuantizationPlan, length: int, threads: int) -> int:
    """Predicted peak RSS of the analysis of a plan on sequences of one length."""
    largest = max(_backbone(plan, layer) for layer in range(plan.config.num_hidden_layers))
    return memory.peak_bytes(plan, length, threads) + _FP32 * largest


def _backbone(plan: QuantizationPlan, layer: int) -> int:
    """Weights of a layer's linears without routed experts."""
    weights = plan.config.backbone(layer)
    return sum(math.prod(weight.shape(plan.config.sizes)) for weight in weights if isinstance(weight, Linear))
