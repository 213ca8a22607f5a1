"""The memory of one die: weights, buffers, and the rest for the caches in bytes and tokens."""

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
from glm5_ascend.plan.workload import Workload

#: Buffers of communicators whose size the engine sets, in and out each (vllm-ascend's default for process groups).
_GROUP_MB = 200


@dataclass(frozen=True)
class Memory:
    """Bytes of one die; `low` and `high` by the ranges of data/memory.yaml.

    Attributes:
        parts: bytes by use, without the cache. weights: bytes of the weights by kind.
        budget: bytes left for the caches of this rank; negative: it does not fit.
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
        nbytes = self.budget if budget is None else budget
        return max(0, int(nbytes / self.bytes_per_token) // cache.PAGE * cache.PAGE)


@functools.cache
def unknowns() -> MemoryFile:
    """Unpublished amounts of memory, with ranges."""
    return read_yaml(data_file("memory.yaml"), MemoryFile)


def fit(
    model: PlannedModel, hardware: Hardware, engine: Engine, decode_only: bool = False, split: bool = False
) -> Memory:
    """Memory of a die of the pipeline stage with the fewest cached tokens.

    Args:
        decode_only: the engine does not prefill. split: prefill and decode run on different nodes.
    """
    stages = (stage_fit(model, hardware, engine, stage, decode_only, split) for stage in engine.stages(model.config))
    return min(stages, key=lambda memory: memory.budget / memory.bytes_per_token)


def stage_fit(
    model: PlannedModel, hardware: Hardware, engine: Engine, stage: PipelineStage, decode_only: bool, split: bool
) -> Memory:
    """Memory of a die of one pipeline stage; arguments as in `fit`."""
    slices = 1 if engine.expert_parallel else engine.tp * engine.dp
    weight_bytes = weights.per_die(model, engine.drafts > 0, engine.tp, engine.ep, engine.redundant, stage, slices)
    total = hardware.memory_bytes.value
    usable = total * engine.utilization
    fixed = {
        "weights": float(sum(weight_bytes.values())),
        **copies(model, engine, decode_only, split, stage),
        "activations": _activations(model, engine),
    }

    def guessed(end: Literal["value", "low", "high"]) -> dict[str, float]:
        def amount(figure: GuessedFigure) -> float:
            return float(getattr(figure, end))

        figures = unknowns()
        hccl_groups = amount(figures.communicators) if engine.dies > 1 else 0  # groups of HCCL_BUFFSIZE
        other_groups = (engine.tp > 1) + 2 * (engine.dp > 1) + (engine.pp > 1)  # tensor; data and world; stages
        return {
            "graphs": 0.0 if engine.eager_decode else amount(figures.graphs_bytes),
            "communication buffers": 2e6 * (engine.buffer_mb * hccl_groups + _GROUP_MB * other_groups),
            "PD transfer": amount(figures.prefill_decode_bytes) if split else 0.0,
            "margin": amount(figures.margin_bytes),
        }

    def budget(end: Literal["value", "low", "high"]) -> float:
        return usable - sum(fixed.values()) - sum(guessed(end).values())

    return Memory(
        total=total,
        usable=usable,
        parts=fixed | guessed("value"),
        weights=weight_bytes,
        bytes_per_token=cache.bytes_per_token(model, engine.drafts > 0, engine.dcp, stage),
        budget=budget("value"),
        budget_low=budget("high"),
        budget_high=budget("low"),
    )


def most_requests(free: Memory, engine: Engine, workload: Workload) -> float:
    """Requests of one rank that fit: by its cache, with the shared prefix once, and by --max-num-seqs.

    A mean, so not a whole number: requests come and go, and are on average half through their output.
    """
    shared = cache.pages(workload.prompt * workload.prefix_hit) if workload.prefix_hit else 0
    mean_request = cache.pages(workload.prompt - shared) + workload.output / 2 + cache.PAGE / 2
    free_tokens = free.tokens() - shared
    if free_tokens < cache.pages(workload.prompt + workload.output - shared):
        return 0.0  # not one whole request
    return max(0.0, min(float(engine.sequences), free_tokens / mean_request))


def _activations(model: PlannedModel, engine: Engine) -> float:
    """Peak of one MoE layer in a full prefill step: residuals, and the routed copies of its tokens."""
    c = model.config
    routed = c.num_experts_per_tok * (c.hidden_size + 4 * c.moe_intermediate_size + 2 * c.hidden_size)
    logits = 4 * engine.sequences * (engine.drafts + 1) * c.vocab_size / engine.tp
    return float(engine.batched_tokens * (6 * 2 * c.hidden_size + routed / engine.tp * 2) + logits)
