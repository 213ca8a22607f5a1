"""Seconds of decode steps and prefills of engines, computed once for each engine: a search asks for them often."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from glm5_ascend.plan.efficiency import Efficiencies
from glm5_ascend.plan.hardware import Hardware
from glm5_ascend.plan.layout import Engine
from glm5_ascend.plan.model import PlannedModel
from glm5_ascend.plan.roofline import Duration, decode_step, prefill_chunk

Floats = NDArray[np.float64]
#: Requests per rank at which a curve's steps are computed.
_BATCHES = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0])


@dataclass(frozen=True)
class PromptTime:
    """Seconds of one prompt's prefill.

    Attributes:
        alone: seconds of the whole prompt. chunks: its steps.
        service: seconds until a rank can take the next prompt (less than `alone` with a pipeline).
        packed: service time where prompts share steps that hold as many tokens as allowed.
    """

    alone: float
    chunks: int
    service: float
    packed: float


class Timing:
    """Step times of one model on one machine."""

    def __init__(self, model: PlannedModel, hardware: Hardware, efficiency: Efficiencies) -> None:
        self.model, self.hardware, self.efficiency = model, hardware, efficiency
        self._steps: dict[tuple[Engine, float, float], Duration] = {}
        self._curves: dict[tuple[Engine, float], tuple[Floats, Floats]] = {}
        self._prompts: dict[tuple[Engine, float, float, float], PromptTime] = {}

    def curve(self, engine: Engine, context: float) -> tuple[Floats, Floats]:
        """(requests per rank, seconds of a decode step), for interpolation."""
        key = (_shape(engine), context)
        if key not in self._curves:
            seconds = [self.step(engine, float(batch), context).seconds for batch in _BATCHES]
            self._curves[key] = _BATCHES, np.array(seconds)
        return self._curves[key]

    def at(self, engine: Engine, per_rank: float, context: float) -> float:
        """Seconds of a decode step, interpolated."""
        batches, seconds = self.curve(engine, context)
        return float(np.interp(per_rank, batches, seconds))

    def near(self, engine: Engine, per_rank: float, context: float) -> Duration:
        """A step with interpolated seconds, divided in the proportions of the nearest computed step."""
        seconds = self.at(engine, per_rank, context)
        batches, _ = self.curve(engine, context)
        nearest = self.step(engine, float(batches[np.abs(np.log(batches / per_rank)).argmin()]), context)
        scale = seconds / nearest.seconds
        by_limit = {name: scale * part for name, part in nearest.by_limit.items()}
        return Duration(seconds, by_limit, {name: scale * part for name, part in nearest.by_op.items()})

    def step(self, engine: Engine, per_rank: float, context: float) -> Duration:
        """A decode step with so many requests per rank, not interpolated."""
        key = (_shape(engine), max(1.0, per_rank), context)
        if key not in self._steps:
            self._steps[key] = decode_step(self.model, self.hardware, engine, self.efficiency, key[1], context)
        return self._steps[key]

    def prompt(self, engine: Engine, fresh: float, cached: float, ranks: float) -> PromptTime:
        """Prefill of `fresh` tokens after `cached` ones, while `ranks` ranks prefill."""
        key = (replace(_shape(engine), batched_tokens=engine.batched_tokens), fresh, cached, ranks)
        if key not in self._prompts:
            self._prompts[key] = self._prompt(engine, fresh, cached, ranks)
        return self._prompts[key]

    def _prompt(self, engine: Engine, fresh: float, cached: float, ranks: float) -> PromptTime:
        chunks = math.ceil(fresh / engine.batched_tokens)
        size = fresh / chunks
        # Time is linear in the start of a chunk except for the few tokens before index_topk: of many chunks the middle
        # one stands for all.
        if chunks > 4:
            whole = chunks * self._chunk(engine, size, cached + fresh / 2 - size / 2, ranks)
        else:
            whole = sum(self._chunk(engine, size, cached + size * i, ranks) for i in range(chunks))
        alone = whole * (chunks + engine.pp - 1) / chunks / engine.pp
        service = packed = whole / engine.pp
        shared = int(engine.batched_tokens // fresh) if chunks == 1 else 1
        if shared > 1:
            packed = min(packed, self._chunk(engine, shared * fresh, cached, ranks) / shared / engine.pp)
        return PromptTime(alone, chunks, service, packed)

    def _chunk(self, engine: Engine, tokens: float, start: float, ranks: float) -> float:
        return prefill_chunk(self.model, self.hardware, engine, self.efficiency, tokens, start, ranks).seconds


def _shape(engine: Engine) -> Engine:
    """The engine without limits on memory and batch, which do not change a step's time."""
    return replace(engine, sequences=1, batched_tokens=1, utilization=1.0, buffer_mb=0)


def bisect(excess: Callable[[float], float], high: float) -> float:
    """The rate in (0, high] at which `excess` (growing in it) turns positive."""
    low = 0.0
    if excess(high) <= 0:
        return high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if excess(middle) > 0 else (middle, high)
        if high - low < 1e-4 * high:
            break
    return (low + high) / 2
