"""Predicted memory of an analysis: the quantizer's, and the probes of a layer's units."""

from __future__ import annotations

from glm5_ascend.model.memory import FP32, linear_values
from glm5_ascend.quantize.estimate import memory
from glm5_ascend.quantize.plan import QuantizationPlan


def peak_bytes(plan: QuantizationPlan, length: int, threads: int) -> int:
    """Predicted peak RSS of the analysis of a plan on sequences of one length."""
    largest = max(linear_values(plan.config, layer) for layer in range(plan.config.num_hidden_layers))
    return memory.peak_bytes(plan, length, threads) + FP32 * largest
