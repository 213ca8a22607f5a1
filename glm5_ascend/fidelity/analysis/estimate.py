"""Predicted time and memory of an analysis: the quantizer's work, and the probes of every unit."""

from __future__ import annotations

import math

from glm5_ascend.fidelity.analysis.experts import EXPERT_ROWS, expert_schemes
from glm5_ascend.fidelity.analysis.layer import PROBE_SEQUENCES
from glm5_ascend.fidelity.analysis.units import units
from glm5_ascend.fidelity.prediction import Prediction
from glm5_ascend.model.spec import Linear
from glm5_ascend.quantize.estimate.memory import peak_bytes
from glm5_ascend.quantize.estimate.time import SHARED, Rates, one_thread, read_rate, source_bytes
from glm5_ascend.quantize.plan import QuantizationPlan

_FP32 = 4


def predict(plan: QuantizationPlan, sequences: int, length: int, threads: int) -> Prediction:
    """Predict the analysis of a plan on so many sequences of one length."""
    count = plan.config.num_hidden_layers
    with one_thread():
        rates = Rates(plan)
        layers = [_seconds(plan, rates, layer, sequences, length) for layer in range(count)]
    share = (SHARED if threads > 1 else 1.0) / threads
    read = source_bytes(plan.source)
    # The system reads the next experts while threads compute.
    slower = max(1.0, read / read_rate(plan.source.files) / (share * sum(layers)))
    peak = peak_bytes(plan, length, threads) + _FP32 * max(_backbone(plan, layer) for layer in range(count))
    return Prediction(tuple(slower * share * seconds for seconds in layers), threads, peak, read)


def _seconds(plan: QuantizationPlan, rates: Rates, layer: int, sequences: int, length: int) -> float:
    """Seconds of one thread for a layer."""
    c, probed = plan.config, min(PROBE_SEQUENCES, sequences) * length
    of_layer = list(units(plan, layer))
    types = max((len(expert_schemes(unit.scheme)) for unit in of_layer if unit.experts), default=1)
    single = sum(not unit.experts for unit in of_layer)
    other = 0.0
    probes = (1 + single) * probed * _backbone(plan, layer)
    if c.is_moe(layer):
        expert = 3 * c.hidden_size * c.moe_intermediate_size
        rows = probed * c.num_experts_per_tok + c.n_routed_experts * EXPERT_ROWS
        probes += (1 + types) * rows * expert
        # Experts are rounded to each type.
        other = (types - 1) * c.n_routed_experts * rates.rounding(c.spec.layer_prefix(layer), c.spec.expert_linears(0))
    work = sum(map(sum, rates.layer(layer, sequences * length, length)))
    return work + other + rates.product * probes


def _backbone(plan: QuantizationPlan, layer: int) -> int:
    """Weights of a layer's linears without routed experts."""
    parts = plan.config.backbone(layer)
    return sum(math.prod(part.shape(plan.config.sizes)) for part in parts if isinstance(part, Linear))
