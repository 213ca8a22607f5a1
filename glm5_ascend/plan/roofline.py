"""Seconds of operators and steps on one machine, and the resources that limit them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from glm5_ascend.plan.efficiency import Efficiencies
from glm5_ascend.plan.hardware import Hardware
from glm5_ascend.plan.layout import Engine
from glm5_ascend.plan.model import PlannedModel
from glm5_ascend.plan.operators import Op, StepLoad, draft_operators, step_operators

#: Share of a link's rate that a collective reaches. A guess, as are the latencies: no public number separates them
#: from the fitted time of a pass.
LINK = 0.6


@dataclass(frozen=True)
class Duration:
    """Seconds of one step, also by limiting resource and by operator."""

    seconds: float
    by_limit: dict[str, float]
    by_op: dict[str, float]

    @property
    def limit(self) -> str:
        return max(self.by_limit, key=lambda name: self.by_limit[name])


def op_seconds(op: Op, hardware: Hardware, efficiency: Efficiencies) -> tuple[float, str]:
    """Time of an operator of one die and its limit: HBM, cube, vector, or the link its group goes over."""
    rates = hardware.rates
    if op.kind:
        return _collective(op, hardware)
    memory = (op.stream / efficiency.stream + op.gather / efficiency.gather) / rates.memory.value
    operator_rate = rates.operators.get(op.name)
    if operator_rate is not None:
        return max((memory, "HBM"), ((op.bf16 + op.int8) / operator_rate.value / efficiency.compute, "cube"))
    cube = (op.bf16 / rates.bf16.value + op.int8 / rates.int8.value) / efficiency.compute
    vector = op.vector / rates.vector.value / efficiency.compute
    # Cube and vector units work in parallel in the fused ops, and while the next data is on its way.
    return max((memory, "HBM"), (cube, "cube"), (vector, "vector"))


def _collective(op: Op, hardware: Hardware) -> tuple[float, str]:
    link = hardware.link(op.group)
    local = min(1.0, (hardware.dies_per_node - 1) / max(1, op.group - 1))  # share of partners inside the node
    wires = op.sent * local / (hardware.links.node.bandwidth * LINK) + op.sent * (1 - local) / (link.bandwidth * LINK)
    if op.kind == "alltoall":
        setup = link.latency + (op.group - 1) * hardware.peer_seconds.value
    else:
        setup = link.latency * math.log2(op.group)
    name = "HCCS" if link is hardware.links.node else "UB" if link is hardware.links.pod else "RoCE"
    return wires + op.count * setup, name


def time_ops(
    ops: Iterable[Op], hardware: Hardware, efficiency: Efficiencies
) -> tuple[dict[str, float], dict[str, float]]:
    """(seconds by limit, seconds by operator)."""
    by_limit: dict[str, float] = defaultdict(float)
    by_op: dict[str, float] = defaultdict(float)
    for op in ops:
        seconds, limit = op_seconds(op, hardware, efficiency)
        by_limit[limit] += seconds
        by_op[op.name] += seconds
    return by_limit, by_op


def decode_step(
    model: PlannedModel, hardware: Hardware, engine: Engine, efficiency: Efficiencies, requests: float, context: float
) -> Duration:
    """Time one step of `requests` per DP rank: verify the drafts, then draft again.

    `requests` may be a fraction: it is a mean over a steady state.
    """
    verified = engine.drafts + 1
    step = StepLoad(requests * verified, requests, context, engine.dp)
    by_limit, by_op = time_ops(step_operators(model, engine, step, hardware.mc2), hardware, efficiency)
    layers = model.config.num_hidden_layers
    scale = hardware.pass_seconds_scale.value
    # A layer with its own indexer has about twice the kernels of one that reuses another layer's positions.
    launch = (layers + model.full_layers) * efficiency.graph_seconds * scale
    if engine.eager_decode:
        launch = layers * efficiency.eager_seconds * scale
    # The first pass of the MTP layer runs over all verified tokens, the others over the last one of each request.
    for passes, tokens in ((min(1, engine.drafts), requests * verified), (engine.drafts - 1, requests)):
        if passes > 0:
            draft_step = StepLoad(tokens, requests, context, engine.dp)
            more, more_ops = time_ops(draft_operators(model, engine, draft_step, hardware.mc2), hardware, efficiency)
            for name, seconds in more.items():
                by_limit[name] += passes * seconds
            by_op["MTP drafts"] += passes * sum(more_ops.values())
    launch += engine.drafts * efficiency.eager_seconds * scale
    by_limit["host"] += launch
    by_op["launch and synchronisation"] += launch
    tokens_time = layers * step.tokens * efficiency.token_seconds
    by_limit["vector"] += tokens_time
    by_op["per token"] += tokens_time
    return Duration(sum(by_limit.values()), dict(by_limit), dict(by_op))


def prefill_chunk(
    model: PlannedModel,
    hardware: Hardware,
    engine: Engine,
    efficiency: Efficiencies,
    tokens: float,
    start: float,
    ranks: float = 1.0,
) -> Duration:
    """Time one chunk of `tokens` prompt tokens after `start` cached ones, on `ranks` ranks at once; the others wait."""
    step = StepLoad(tokens, 1, start + tokens / 2, ranks, prefill=True)
    ops = step_operators(model, engine, step, hardware.mc2)
    by_limit, by_op = time_ops(ops, hardware, efficiency)
    by_limit = {name: seconds / efficiency.prefill for name, seconds in by_limit.items()}
    by_op = {name: seconds / efficiency.prefill for name, seconds in by_op.items()}
    device = sum(by_limit.values())
    host = model.config.num_hidden_layers * efficiency.eager_seconds * hardware.pass_seconds_scale.value
    if not hardware.host_ahead:
        by_limit["host"] = host
        by_op["launch and synchronisation"] = host
    elif host > device:  # the host launches ahead: only the difference counts
        by_limit["host"] = host - device
        by_op["launch and synchronisation"] = host - device
    return Duration(sum(by_limit.values()), dict(by_limit), dict(by_op))
