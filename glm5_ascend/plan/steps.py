"""Seconds of decode steps and prefills of engines on one machine, and the resources that limit them."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from glm5_ascend.plan import memory
from glm5_ascend.plan.hardware import Constants, Hardware
from glm5_ascend.plan.inputs import Workload
from glm5_ascend.plan.layout import Engine
from glm5_ascend.plan.model import PlannedModel
from glm5_ascend.plan.operators import Op, StepLoad, draft_operators, step_operators

LINK = 0.5  # share of a link's rate that a collective reaches, a guess: no public result depends on it
#: Requests per rank at which a curve's steps are computed.
_BATCHES = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0]


class Duration(defaultdict[tuple[str, str], float]):
    """Seconds of one step by (operator, limiting resource)."""

    @property
    def seconds(self) -> float:
        return sum(self.values())

    @property
    def by_op(self) -> dict[str, float]:
        return {name: sum(s for (op, _), s in self.items() if op == name) for name, _ in self}

    @property
    def by_limit(self) -> dict[str, float]:
        return {name: sum(s for (_, limit), s in self.items() if limit == name) for _, name in self}


class PromptTime(NamedTuple):
    """Seconds of a prompt's prefill in `chunks` steps (not a whole number), and of its share where steps are full."""

    alone: float
    chunks: float
    packed: float


class Steps:
    """Step times and memory of one model on one machine; everything is computed once for each engine."""

    def __init__(self, model: PlannedModel, hardware: Hardware, constants: Constants) -> None:
        self.model, self.hardware, self.constants = model, hardware, constants
        #: Memory of a die by engine, `decode_only` and `split`; see `memory.fit`.
        self.memory = functools.cache(functools.partial(memory.fit, model, hardware))
        self._decode, self._prompt = functools.cache(self.decode), functools.cache(self._prefill)

    def curve(self, engine: Engine, context: float, ranks: float) -> tuple[list[float], list[float]]:
        """(requests per rank, seconds of a decode step), for interpolation; `ranks` have requests."""
        shape = _shape(engine, 1)
        return _BATCHES, [self._decode(shape, batch, context, ranks).seconds for batch in _BATCHES]

    def decode(self, engine: Engine, requests: float, context: float, ranks: float) -> Duration:
        """A step of `requests` on each of `ranks` DP ranks: verify the drafts, then draft again."""
        verified, constants, model = engine.drafts + 1, self.constants, self.model
        step = StepLoad(requests * verified, requests, context, ranks)
        times = self._time(step_operators(model, self.hardware, engine, step))
        layers = model.config.num_hidden_layers
        # A layer with its own top-k has about twice the kernels of one that reuses another layer's positions.
        launch = (layers + model.topk_layers(engine.index_cache)) * constants.graph_seconds
        if engine.eager:
            launch = layers * constants.eager_seconds
        # The first pass of the MTP layer runs over all verified tokens, the others over the last one of each request.
        for passes, tokens in ((min(1, engine.drafts), requests * verified), (engine.drafts - 1, requests)):
            if passes > 0:
                load = StepLoad(tokens, requests, context, ranks)
                for (_, limit), seconds in self._time(draft_operators(model, self.hardware, engine, load)).items():
                    times["MTP drafts", limit] += passes * seconds
        launch += engine.drafts * constants.eager_seconds + constants.step_seconds
        times["launch and synchronisation", "host"] += launch
        times["per token", "vector"] += layers * step.tokens * constants.token_seconds
        return times

    def prompt(self, engine: Engine, fresh: float, cached: float, ranks: float) -> PromptTime:
        """Prefill of `fresh` tokens after `cached` ones, while `ranks` ranks prefill at the same time."""
        return self._prompt(_shape(engine, engine.batched_tokens), fresh, cached, ranks)

    def _prefill(self, engine: Engine, fresh: float, cached: float, ranks: float) -> PromptTime:
        chunks = max(1.0, fresh / engine.batched_tokens)
        context = cached + fresh / 2
        whole = chunks * self.chunk(engine, fresh / chunks, context, ranks, 1.0)
        shared = max(1.0, engine.batched_tokens / fresh)  # prompts in a full step
        packed = chunks * self.chunk(engine, shared * fresh / chunks, context, ranks, shared) / shared
        alone = whole * (chunks + engine.pp - 1) / chunks / engine.pp
        return PromptTime(alone, chunks, min(packed, whole) / engine.pp)

    def chunk(self, engine: Engine, tokens: float, context: float, ranks: float, prompts: float) -> float:
        """Seconds of a step with `tokens` tokens of `prompts` prompts on each of `ranks` ranks."""
        step = StepLoad(tokens, prompts, context, ranks, prefill=True)
        device = self._time(step_operators(self.model, self.hardware, engine, step)).seconds
        host = self.model.config.num_hidden_layers * self.constants.eager_seconds
        return max(device, host) + self.constants.step_seconds  # the host launches ahead of the device

    def _time(self, ops: Iterable[Op]) -> Duration:
        """Time of operators of one die; HBM, cube and vector units work at the same time."""
        times, hardware, c = Duration(float), self.hardware, self.constants
        rates, links = hardware.rates, hardware.links
        for op in ops:
            cube = op.bf16 / rates.bf16 + op.int8 / rates.int8
            units = ("cube", cube / c.compute), ("vector", op.vector / rates.vector / c.compute)
            limit, seconds = max(("HBM", op.nbytes / rates.memory / c.memory), *units, key=lambda unit: unit[1])
            if op.collective and op.group <= 1:
                continue  # nothing to send
            if op.collective:
                link = hardware.link(op.group)
                local = min(1.0, (hardware.dies_per_node - 1) / (op.group - 1))  # share of partners inside the node
                seconds = op.sent / LINK * (local / links.node.bandwidth + (1 - local) / link.bandwidth)
                if op.collective == "alltoall":
                    seconds += op.count * (link.latency + (op.group - 1) * hardware.peer_seconds)
                else:
                    seconds += op.count * link.latency * math.log2(op.group)
                limit = "HCCS" if link is links.node else "UB" if link is links.pod else "RoCE"
            times[op.name, limit] += seconds
        return times

    def hits(self, engine: Engine, load: Workload, cached: float, ranks: float) -> PromptTime:
        """A prompt of which so many tokens are found in the caches of `load.hits`; loading them blocks the rank."""
        nbytes = cached * memory.bytes_per_token(self.model, engine.drafts > 0)
        rates = {"host": self.hardware.host_bandwidth, "pool": self.hardware.pool_bandwidth}
        seconds = nbytes / rates.get(load.hits, math.inf)
        alone, chunks, packed = self.prompt(engine, load.prompt - cached, cached, ranks)
        return PromptTime(alone + seconds, chunks, packed + seconds)

    def transfer(self, engine: Engine, tokens: float) -> float:
        """Seconds to send the cache of a prompt to the decode engine, whole to each die of a tensor-parallel group."""
        return tokens * memory.bytes_per_token(self.model, engine.drafts > 0) / self.hardware.transfer_bandwidth


def _shape(engine: Engine, batched_tokens: int) -> Engine:
    """The engine without limits on memory and batch, which do not change a step's time."""
    return replace(engine, sequences=1, batched_tokens=batched_tokens, utilization=1.0, buffer_mb=0)
