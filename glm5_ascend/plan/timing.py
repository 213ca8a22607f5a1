"""Seconds of decode steps and prefills of engines, computed once for each engine and kept: a search asks often."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from glm5_ascend.plan.efficiency import Efficiencies
from glm5_ascend.plan.hardware import Hardware
from glm5_ascend.plan.layout import Engine
from glm5_ascend.plan.model import PlannedModel
from glm5_ascend.plan.roofline import Duration, decode_step, prefill_chunk

#: Requests per rank at which a curve's steps are computed.
_BATCHES = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0])


@dataclass(frozen=True)
class PromptTime:
    """Seconds of one prompt's prefill.

    Attributes:
        alone: the whole prompt. chunks: in how many steps. service: until a rank can take the next one (less than
            `alone` with a pipeline). tight: the same where prompts share steps, each of all the tokens it may have.
    """

    alone: float
    chunks: int
    service: float
    tight: float


class Timing:
    """Of one model on one machine for requests of one size."""

    def __init__(self, model: PlannedModel, hardware: Hardware, efficiency: Efficiencies) -> None:
        self.model, self.hardware, self.efficiency = model, hardware, efficiency
        self._steps: dict[tuple[Engine, float, float], Duration] = {}
        self._curves: dict[tuple[Engine, float], tuple[NDArray[np.float64], NDArray[np.float64]]] = {}
        self._prompts: dict[tuple[Engine, float, float, float], PromptTime] = {}

    def curve(self, engine: Engine, context: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(requests per rank, seconds of a decode step): between them it is interpolated."""
        key = (_shape(engine), context)
        if key not in self._curves:
            self._curves[key] = (
                _BATCHES, np.array([self.step(engine, float(n), context).seconds for n in _BATCHES])
            )  # fmt: skip
        return self._curves[key]

    def at(self, engine: Engine, per_rank: float, context: float) -> float:
        """Seconds of a decode step, interpolated."""
        batches, seconds = self.curve(engine, context)
        return float(np.interp(per_rank, batches, seconds))

    def near(self, engine: Engine, per_rank: float, context: float) -> Duration:
        """A step whose seconds are interpolated, and divided as in the nearest one that was computed."""
        seconds = self.at(engine, per_rank, context)
        batches, _ = self.curve(engine, context)
        known = self.step(engine, float(batches[np.abs(np.log(batches / per_rank)).argmin()]), context)
        scale = seconds / known.seconds
        limits, ops = ({name: scale * part for name, part in parts.items()} for parts in (known.by_limit, known.by_op))
        return Duration(seconds, limits, ops)

    def step(self, engine: Engine, per_rank: float, context: float) -> Duration:
        """A decode step with so many requests per rank, not interpolated."""
        key = (_shape(engine), max(1.0, per_rank), context)
        if key not in self._steps:
            self._steps[key] = decode_step(self.model, self.hardware, engine, self.efficiency, key[1], context)
        return self._steps[key]

    def prompt(self, engine: Engine, fresh: float, done: float, ranks: float) -> PromptTime:
        """`fresh` tokens behind `done` cached ones, while so many ranks prefill."""
        key = (replace(_shape(engine), batched_tokens=engine.batched_tokens), fresh, done, ranks)
        if key not in self._prompts:
            self._prompts[key] = self._prompt(engine, fresh, done, ranks)
        return self._prompts[key]

    def _prompt(self, engine: Engine, fresh: float, done: float, ranks: float) -> PromptTime:
        chunks = math.ceil(fresh / engine.batched_tokens)
        size = fresh / chunks
        # Time is linear in where a chunk starts but for the few tokens before index_topk: the middle stands for all.
        middle = done + fresh / 2 - size / 2
        starts = [middle] * chunks if chunks > 4 else [done + size * i for i in range(chunks)]
        if chunks > 4:
            whole = chunks * self._chunk(engine, size, middle, ranks)
        else:
            whole = sum(self._chunk(engine, size, start, ranks) for start in starts)
        alone = whole * (chunks + engine.pp - 1) / chunks / engine.pp
        service = tight = whole / engine.pp
        shared = int(engine.batched_tokens // fresh) if chunks == 1 else 1
        if shared > 1:
            tight = min(tight, self._chunk(engine, shared * fresh, done, ranks) / shared / engine.pp)
        return PromptTime(alone, chunks, service, tight)

    def _chunk(self, engine: Engine, tokens: float, start: float, ranks: float) -> float:
        found = prefill_chunk(self.model, self.hardware, engine, self.efficiency, tokens, start, ranks)
        return found.seconds


def _shape(engine: Engine) -> Engine:
    """What decides a step's time: without limits on memory and batch."""
    return replace(engine, sequences=1, batched_tokens=1, utilization=1.0, buffer_mb=0)
