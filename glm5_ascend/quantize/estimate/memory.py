"""Predicted memory of a quantization, by phase, and disk: from the plan alone.

A thread holds `_COPIES` fp32 copies of the values that it works on; a sequence's forward is counted from its shapes. A
test at GLM-5's widths compares the prediction with a measured run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from glm5_ascend.checkpoint.types import GIB
from glm5_ascend.errors import OutputError
from glm5_ascend.model.memory import FP32, expert_values, forward_bytes
from glm5_ascend.model.spec import Linear, Weight
from glm5_ascend.quantize.methods.input_statistics import SEARCH_ROWS
from glm5_ascend.quantize.plan import QuantizationPlan
from glm5_ascend.quantize.run.blocks import BLOCK_WEIGHTS
from glm5_ascend.quantize.run.expert import EXPERT_TOKENS

IMPORTS = 560 * 1024**2  # interpreter, torch, transformers' tokenizer (measured)
_COPIES = 9  # of a block, of the rows of a search, of an expert's tokens


@dataclass(frozen=True)
class RunPrediction:
    seconds: float
    threads: int
    peak_rss_bytes: int
    output_bytes: int
    activation_bytes: int
    source_bytes: int


def memory(plan: QuantizationPlan, seq_len: int) -> list[tuple[int, int]]:
    """Predicted peak of each phase (tables, the backbone of each layer, experts) in bytes: fixed, and per thread."""
    c, size = plan.config, plan.config.sizes
    block = FP32 * _COPIES * BLOCK_WEIGHTS
    phases = [(FP32 * 3 * c.hidden_size**2, block)]
    for layer in range(c.num_layers_with_mtp):
        parts = [weight for weight in c.backbone(layer) if not weight.is_table]
        rows = SEARCH_ROWS * max(size[weight.inp] for weight in parts if isinstance(weight, Linear))
        values = sum(math.prod(weight.shape(size)) for weight in parts) + 4 * rows
        per_thread = block
        if layer <= plan.last_calibrated_layer:
            per_thread = max(block, FP32 * _COPIES * rows, forward_bytes(c, seq_len))
        phases.append((FP32 * values + _states(plan, layer, parts), per_thread))
    width = c.hidden_size + c.moe_intermediate_size
    expert = FP32 * (expert_values(c) + _COPIES * max(BLOCK_WEIGHTS, EXPERT_TOKENS * width))
    routed = filter(c.is_moe, range(c.num_layers_with_mtp))
    if states := max((_states(plan, layer, c.spec.expert_linears(0)) for layer in routed), default=0):
        expert += states + FP32 * SEARCH_ROWS * width
    return [*phases, (0, expert)]


def _states(plan: QuantizationPlan, layer: int, parts: Iterable[Weight]) -> int:
    prefix, size = plan.config.spec.layer_prefix(layer), plan.config.sizes
    linears = [weight for weight in parts if isinstance(weight, Linear)]
    inputs = {(plan.linears[prefix + weight.name].method, size[weight.inp]) for weight in linears}
    return sum(method.state_bytes(columns) for method, columns in inputs)


def peak_bytes(plan: QuantizationPlan, seq_len: int, threads: int) -> int:
    """Predicted peak RSS: of the worst phase."""
    return IMPORTS + max(fixed + threads * per_thread for fixed, per_thread in memory(plan, seq_len))


def threads_within(plan: QuantizationPlan, seq_len: int, threads: int, max_ram: int) -> int:
    """The most threads, up to `threads`, whose predicted peak stays within `max_ram` bytes; OutputError if none do."""
    fitting = min((max_ram - IMPORTS - fixed) // per_thread for fixed, per_thread in memory(plan, seq_len))
    if fitting < 1:
        raise OutputError(
            f"--max-ram {max_ram / GIB:.1f} GiB: this model needs {peak_bytes(plan, seq_len, 1) / GIB:.1f} GiB",
            "raise --max-ram or shorten --seq-len",
        )
    return min(threads, fitting)


def disk_bytes(plan: QuantizationPlan, tokens: int) -> int:
    """Bytes of calibration activations on disk at most: two streams of int64 and the experts' inputs in fp32."""
    if plan.last_calibrated_layer < 0:
        return 0
    return tokens * (plan.config.stream_width * 2 * 8 + plan.config.hidden_size * FP32)
