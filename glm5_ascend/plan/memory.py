"""The memory of one die: what takes it, what is left for caches, and how many tokens and requests that is."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

from glm5_ascend.files.yaml_file import read_yaml
from glm5_ascend.plan import cache, weights
from glm5_ascend.plan.copies import copies
from glm5_ascend.plan.data_files import GuessedFigure, MemoryFile, data_file
from glm5_ascend.plan.hardware import Hardware
from glm5_ascend.plan.layout import Engine
from glm5_ascend.plan.model import PlannedModel
from glm5_ascend.plan.stages import PipelineStage

#: Of communicators whose size the engine sets itself, in and out each (vllm-ascend's default for process groups).
_GROUP_MB = 200


@dataclass(frozen=True)
class Memory:
    """Bytes of one die, `low` and `high` by the ranges of data/memory.yaml.

    Attributes:
        parts: what takes memory besides the cache, largest first.
        budget: left for the caches of this rank; negative: it does not fit.
    """

    total: float
    usable: float
    parts: dict[str, float]
    weights: dict[str, int]
    bytes_per_token: float
    budget: float
    budget_low: float
    budget_high: float

    def tokens(self, budget: float | None = None) -> int:
        """Cached tokens of one rank, in whole pages."""
        left = self.budget if budget is None else budget
        return max(0, int(left / self.bytes_per_token) // cache.PAGE * cache.PAGE)


@functools.cache
def unknowns() -> MemoryFile:
    """What takes memory and nobody published, with ranges."""
    return read_yaml(data_file("memory.yaml"), MemoryFile)


def fit(
    model: PlannedModel, hardware: Hardware, engine: Engine, decode_only: bool = False, split: bool = False
) -> Memory:
    """Memory of one die under `engine`, of the stage with the fewest tokens; `split`: prefill and decode on different
    nodes."""
    found = (stage_fit(model, hardware, engine, stage, decode_only, split) for stage in engine.stages(model.config))
    return min(found, key=lambda memory: memory.budget / memory.bytes_per_token)


def stage_fit(
    model: PlannedModel, hardware: Hardware, engine: Engine, stage: PipelineStage, decode_only: bool, split: bool
) -> Memory:
    """The same of one pipeline stage."""
    slices = 1 if engine.expert_parallel else engine.tp * engine.dp
    own = weights.per_die(model, engine.drafts > 0, engine.tp, engine.ep, engine.redundant, stage, slices)
    total = hardware.memory_bytes.value
    usable = total * engine.utilization
    fixed = {
        "weights": float(sum(own.values())),
        **copies(model, engine, decode_only, split, stage),
        "activations": _activations(model, engine),
    }

    def rest(which: Literal["value", "low", "high"]) -> dict[str, float]:
        def guess(unknown: GuessedFigure) -> float:
            return float(getattr(unknown, which))

        guessed = unknowns()
        wide = guess(guessed.communicators) if engine.dies > 1 else 0  # groups of HCCL_BUFFSIZE
        others = (engine.tp > 1) + 2 * (engine.dp > 1) + (engine.pp > 1)  # tensor; data and world; stages
        return {
            "graphs": 0.0 if engine.eager_decode else guess(guessed.graphs_bytes),
            "communication buffers": 2e6 * (engine.buffer_mb * wide + _GROUP_MB * others),
            "PD transfer": guess(guessed.prefill_decode_bytes) if split else 0.0,
            "margin": guess(guessed.margin_bytes),
        }

    left = [usable - sum(fixed.values()) - sum(part.values()) for part in (rest("value"), rest("high"), rest("low"))]
    token = cache.bytes_per_token(model, engine.drafts > 0, engine.dcp, stage)
    return Memory(
        total, usable, fixed | rest("value"), own, token,
        *left,
    )  # fmt: skip


def _activations(model: PlannedModel, engine: Engine) -> float:
    """Largest tensors alive in one MoE layer of a full prefill step: residuals, and the routed copies of its tokens."""
    c = model.config
    routed = c.num_experts_per_tok * (c.hidden_size + 4 * c.moe_intermediate_size + 2 * c.hidden_size)
    logits = 4 * engine.sequences * (engine.drafts + 1) * c.vocab_size / engine.tp
    return float(engine.batched_tokens * (6 * 2 * c.hidden_size + routed / engine.tp * 2) + logits)
