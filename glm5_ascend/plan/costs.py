"""What a step of an engine costs, as small tables: all the simulator needs of the roofline."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from glm5_ascend.plan import cache, memory
from glm5_ascend.plan.efficiency import Efficiencies
from glm5_ascend.plan.hardware import Hardware
from glm5_ascend.plan.layout import Engine
from glm5_ascend.plan.model import PlannedModel
from glm5_ascend.plan.roofline import decode_step, prefill_chunk
from glm5_ascend.plan.workload import Acceptance, accepted

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Costs:
    """Of one engine.

    Attributes:
        ranks: DP ranks, each of which prefills one prompt at a time.
        slots: most requests of a rank. room: cached tokens of a rank.
        chunk: tokens of a prefill chunk.
        gain: expected tokens a decoding request gains per step.
        step: seconds of a decode step with 0, 1, 2, ... requests per rank (interpolated between).
        prefill: seconds of a chunk = [0] + [1] x its tokens + [2] x its tokens x their mean context.
        chances: probability that a draft is accepted, given that those before it were.
    """

    ranks: int
    slots: int
    room: int
    chunk: int
    gain: float
    step: Floats
    prefill: tuple[float, float, float]
    chances: tuple[float, ...]


def costs(
    model: PlannedModel, hardware: Hardware, engine: Engine, efficiency: Efficiencies, context: float,
    decode_only: bool = False, split: bool = False, acceptance: float | Acceptance | None = None,
) -> Costs:  # fmt: skip
    """Tables of `engine` for requests that are about `context` tokens long."""
    held = memory.fit(model, hardware, engine, decode_only, split)
    known = np.unique(np.round(np.geomspace(1, engine.sequences, 12)))
    seconds = [decode_step(model, hardware, engine, efficiency, float(n), context).seconds for n in known]
    step = np.interp(np.arange(engine.sequences + 1), known, seconds)
    step[0] = 0.0
    lengths = [accepted(n, acceptance) for n in range(engine.drafts + 1)]
    gains = np.diff(lengths)  # chance that this many drafts are accepted
    chances = tuple(float(g / before) for g, before in zip(gains, [1.0, *gains], strict=False))
    return Costs(
        engine.dp, engine.sequences, held.tokens(), engine.batched_tokens, lengths[-1], step,
        _prefill(model, hardware, engine, efficiency, context), chances,
    )  # fmt: skip


def _prefill(
    model: PlannedModel, hardware: Hardware, engine: Engine, efficiency: Efficiencies, context: float
) -> tuple[float, float, float]:
    """Plane through chunks of three sizes and two contexts, by least squares; no part is negative."""
    rows, values = [], []
    for tokens in (engine.batched_tokens, engine.batched_tokens / 2, engine.batched_tokens / 4):
        for start in (0.0, context):
            found = prefill_chunk(model, hardware, engine, efficiency, tokens, start)
            rows.append((1.0, tokens, tokens * (start + tokens / 2)))
            values.append(found.seconds)
    a = np.array(rows) / np.array(values)[:, None]  # relative errors count
    plane = np.linalg.lstsq(a, np.ones(len(values)), rcond=None)[0]
    fixed, token, pair = (max(0.0, float(x)) for x in plane)
    return fixed, token, pair


def reserved(prompt: float, output: float) -> int:
    """Cached tokens a request holds while it is in the engine, whole pages."""
    return cache.pages(prompt + output)
