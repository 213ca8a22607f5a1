"""What a quantization will need of memory, per phase, and of disk: from the plan alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from glm5_ascend.checkpoint.types import GIB
from glm5_ascend.errors import OutputError
from glm5_ascend.model.config import ModelConfig
from glm5_ascend.model.layers import SCORES
from glm5_ascend.model.spec import Linear, Vector
from glm5_ascend.quantize.calibration.product import ROWS_AT_ONCE
from glm5_ascend.quantize.limits import (
    BLOCK_WEIGHTS,
    EXPERT_TOKENS,
    SEARCH_OUTPUTS,
    SEARCH_ROWS,
)
from glm5_ascend.quantize.plan import QuantizationPlan

_IMPORTS = 560 * 1024**2  # interpreter, torch, transformers' tokenizer (measured)
_FP32 = 4
_BLOCK_COPIES = 8  # fp32 copies of a block alive while it is rotated or rounded
_INPUT_COPIES = 7  # of a linear's inputs while its rounding state is prepared: three, and two in float64


@dataclass(frozen=True)
class RunPrediction:
    """What `--dry-run` says about a run."""

    seconds: float
    threads: int
    peak_rss_bytes: int
    output_bytes: int
    activation_bytes: int
    source_bytes: int


@dataclass(frozen=True)
class PhaseMemory:
    """Predicted peak in bytes: `fixed` whatever the threads, `per_thread` for each; the worst phase."""

    fixed: int
    per_thread: int

    def peak(self, threads: int) -> int:
        return self.fixed + threads * self.per_thread


def memory(plan: QuantizationPlan, seq_len: int) -> list[PhaseMemory]:
    """One entry per phase: tables, each kind of layer's backbone, experts."""
    c, size = plan.config, plan.config.sizes
    block = _BLOCK_COPIES * _FP32 * BLOCK_WEIGHTS
    phases = [PhaseMemory(_IMPORTS + 3 * _FP32 * c.hidden_size**2, block)]
    calibrated = plan.last_calibrated_layer
    for layer in range(c.num_layers_with_mtp):
        parts, weights = _backbone(c, layer)
        widest = max(size[part.inp] for part in parts if isinstance(part, Linear))
        rows = _FP32 * SEARCH_ROWS * widest
        sequence = _sequence(c, seq_len) if layer <= calibrated else 0
        search = 6 * rows if layer <= calibrated else 0
        states, largest, prepared = _method_bytes(plan, layer, parts)
        per_thread = max(block + largest, sequence, _INPUT_COPIES * prepared, search)
        phases.append(PhaseMemory(_IMPORTS + weights + 4 * rows + states, per_thread))
    expert = 3 * _FP32 * c.hidden_size * c.moe_intermediate_size
    run = EXPERT_TOKENS * (c.hidden_size * 40 + c.moe_intermediate_size * 16)
    search = 8 * _FP32 * (SEARCH_ROWS + SEARCH_OUTPUTS) * c.moe_intermediate_size
    for layer in filter(c.is_moe, range(c.num_layers_with_mtp)):
        states, _, largest = _method_bytes(plan, layer, plan.config.spec.expert_linears(0))
        if states:
            inputs = sum(_FP32 * SEARCH_ROWS * width for width in (c.hidden_size, c.moe_intermediate_size))
            block, run = max(block + 2 * states, _INPUT_COPIES * largest) + inputs, run + inputs
            break
    phases.append(PhaseMemory(_IMPORTS, expert + max(block, run, search)))
    return phases


def _method_bytes(plan: QuantizationPlan, layer: int, parts: Iterable[Linear | Vector]) -> tuple[int, int, int]:
    """Bytes of the states of all inputs, of the largest state, and of the inputs that the largest is prepared from."""
    size = plan.config.sizes
    planned = {
        (plan.linears[plan.config.spec.layer_prefix(layer) + part.name].method, size[part.inp])
        for part in parts
        if isinstance(part, Linear)
    }
    states = [method.state_bytes(columns) for method, columns in planned]
    return sum(states), max(states), max(method.input_bytes(columns) for method, columns in planned)


def _backbone(c: ModelConfig, layer: int) -> tuple[list[Linear | Vector], int]:
    """What is held of a layer besides its routed experts, and its bytes."""
    held = [part for part in c.backbone(layer) if not part.is_table]
    size = c.sizes
    return held, sum(_FP32 * torch.Size(part.shape(size)).numel() for part in held)


def _sequence(c: ModelConfig, length: int) -> int:
    """Bytes one sequence's forward holds at a time: in attention, or in the MLP behind it."""
    scores, index = min(SCORES, c.num_attention_heads * length**2), min(SCORES, length**2)
    heads = c.num_attention_heads * 2 * (c.qk_nope_head_dim + c.qk_rope_head_dim + c.v_head_dim)
    chosen, scratch = 0, 4 * scores  # four: where no fused kernel serves
    if length > c.index_topk:
        chosen, queries = length**2, 3 * length * c.index_n_heads * c.index_head_dim
        scratch = max(scratch, queries + 4 * index)
    attention = _FP32 * (length * (heads + 4 * c.hidden_size) + scratch) + chosen
    widest = max(c.intermediate_size, c.n_shared_experts * c.moe_intermediate_size)
    mlp = _FP32 * length * (3 * widest + 5 * c.hidden_size)
    rounded = 2 * ROWS_AT_ONCE * max(c.num_attention_heads * c.v_head_dim, c.intermediate_size)
    return max(attention, mlp) + rounded


def peak_bytes(plan: QuantizationPlan, seq_len: int, threads: int) -> int:
    """Predicted peak RSS."""
    return max(phase.peak(threads) for phase in memory(plan, seq_len))


def threads_within(plan: QuantizationPlan, seq_len: int, threads: int, max_ram: int) -> int:
    """The most threads, up to `threads`, whose predicted peak stays within `max_ram` bytes.

    Raises:
        OutputError: not even one does.
    """
    fitting = [n for n in range(1, threads + 1) if peak_bytes(plan, seq_len, n) <= max_ram]
    if not fitting:
        raise OutputError(
            f"--max-ram {max_ram / GIB:.1f} GiB: this model needs {peak_bytes(plan, seq_len, 1) / GIB:.1f} GiB",
            "raise --max-ram or shorten --seq-len",
        )
    return fitting[-1]


def disk_bytes(plan: QuantizationPlan, tokens: int) -> int:
    """Bytes of calibration activations on disk at their most.

    Two streams of int64 and the experts' inputs in fp32.
    """
    if plan.last_calibrated_layer < 0:
        return 0
    return tokens * plan.config.hidden_size * (2 * 8 + _FP32)
