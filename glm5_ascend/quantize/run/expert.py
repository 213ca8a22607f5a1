"""One routed expert: read, fuse, rotate, run on its tokens, search its scale, round, write, free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from glm5_ascend.model import layers
from glm5_ascend.model.config import ModelConfig
from glm5_ascend.model.spec import Linear
from glm5_ascend.quantize.calibration.forward import Routed, product
from glm5_ascend.quantize.methods.input_statistics import SEARCH_ROWS, InputStatistics, levelled, spread
from glm5_ascend.quantize.methods.method import Method, RoundingState
from glm5_ascend.quantize.methods.smoothing import search_scale
from glm5_ascend.quantize.methods.transforms import Tensors, move_scale
from glm5_ascend.quantize.plan import LinearPlan, QuantizationPlan
from glm5_ascend.quantize.run.blocks import ErrorSums, add_errors
from glm5_ascend.quantize.run.journal import UnitRecord, WorkUnit
from glm5_ascend.quantize.run.source_weights import FloatWeights
from glm5_ascend.quantize.run.store import Store

#: Tokens that a routed expert works on at a time.
EXPERT_TOKENS = 512
#: An expert that saw fewer tokens keeps its scales: a search on them would fit noise. It is reported.
COLD_EXPERT_TOKENS = 8


@dataclass
class ExpertInputs:
    """Inputs of an expert's linears.

    Attributes:
        down: statistics of down_proj's input.
        hidden_rows, inner_rows: rows of both inputs, weighted as the router weighs the expert's output, for methods
            that need inputs; on the host.
    """

    down: InputStatistics
    hidden_rows: list[torch.Tensor] = field(default_factory=list)
    inner_rows: list[torch.Tensor] = field(default_factory=list)


class SmoothedExpert(NamedTuple):
    """An expert whose weights are ready to be rounded.

    Attributes:
        inputs: of its linears, before smoothing.
        scale: fp32 [moe_intermediate_size] that down_proj's input is divided by; None where nothing was moved.
        states: by linear, of those whose method needs inputs.
        cold: too few tokens for the searches of the plan.
    """

    inputs: ExpertInputs
    scale: torch.Tensor | None
    states: dict[str, RoundingState | None]
    cold: bool


def smooth_expert(plan: QuantizationPlan, tensors: Tensors, layer: int, expert: int, routed: Routed) -> SmoothedExpert:
    """Run an expert in float on its tokens, move its scale in `tensors`, and prepare its rounding.

    A cold expert is rounded to nearest: searches on so few tokens would fit noise.
    """
    prefix, parts = plan.config.spec.layer_prefix(layer), plan.config.spec.expert_linears(expert)
    methods = {plan.linears[prefix + linear.name].method for linear in parts}
    inputs = run_expert(plan.config, tensors, parts, expert, routed, methods)
    searches = list(plan.smoothing(layer, plan.config.spec.expert_subgraphs(expert)))
    if inputs.down.tokens < COLD_EXPERT_TOKENS:
        return SmoothedExpert(inputs, None, {}, bool(searches or plan.uses_inputs(prefix, parts)))
    scale = None
    for search in searches:
        scale = search_scale([tensors[f"{search.subgraph.targets[0]}.weight"]], inputs.down, search)
        scale = move_scale(tensors, plan.config, search.subgraph, scale)
    return SmoothedExpert(inputs, scale, _prepare(plan, prefix, parts, inputs, scale), False)


def _prepare(
    plan: QuantizationPlan, prefix: str, parts: Sequence[Linear], inputs: ExpertInputs, scale: torch.Tensor | None
) -> dict[str, RoundingState | None]:
    """States by linear; gate_proj and up_proj read the same input and share one if their plans are equal."""
    states: dict[str, RoundingState | None] = {}
    shared: dict[tuple[bool, LinearPlan], RoundingState | None] = {}
    for linear in parts:
        planned, is_down = plan.linears[prefix + linear.name], linear is parts[-1]
        if not planned.method.needs_inputs:
            continue
        if (is_down, planned) not in shared:
            rows = torch.cat(inputs.inner_rows if is_down else inputs.hidden_rows)
            rows = rows / scale.cpu() if is_down and scale is not None else rows
            shared[is_down, planned] = planned.method.prepare(rows, planned.steps)
        states[linear.name] = shared[is_down, planned]
    return states


def quantize_expert(
    weights: FloatWeights, store: Store, layer: int, expert: int, gains: Tensors, routed: Routed | None
) -> UnitRecord:
    """Write one expert and add its output to the stream."""
    spec = store.plan.config.spec
    prefix, parts = spec.layer_prefix(layer), spec.expert_linears(expert)
    tensors = weights.load_all(prefix, parts, gains)
    smoothed = None if routed is None else smooth_expert(store.plan, tensors, layer, expert, routed)
    errors: ErrorSums = {}
    for linear in parts:
        state = None if smoothed is None else smoothed.states.get(linear.name)
        add_errors(errors, store.write(prefix, linear, tensors.pop(linear.tensor_name), state))
    cold = smoothed is not None and smoothed.cold
    return UnitRecord(errors, cold, store.checksum(WorkUnit.expert(layer, expert)))


def rerun_expert(weights: FloatWeights, layer: int, expert: int, gains: Tensors, routed: Routed) -> None:
    """Add only the output: of an expert that a stopped run had written already."""
    spec = weights.source.config.spec
    parts = spec.expert_linears(expert)
    run_expert(weights.source.config, weights.load_all(spec.layer_prefix(layer), parts, gains), parts, expert, routed)


def run_expert(
    config: ModelConfig,
    tensors: Tensors,
    parts: Sequence[Linear],
    expert: int,
    routed: Routed,
    methods: Iterable[Method] = (),
) -> ExpertInputs:
    """Add the expert's output to the stream; returns the inputs of its linears, with the rows that `methods` need."""
    gate, up, down = (tensors[linear.tensor_name] for linear in parts)
    token, slot = torch.where(routed.ids == expert)
    inputs = ExpertInputs(InputStatistics(SEARCH_ROWS, len(token)))
    needs = [method for method in methods if method.needs_inputs]
    keep_hidden, keep_inner = (
        evenly_spaced(len(token), max((m.input_rows(len(token), w.shape[1]) for m in needs), default=0))
        for w in (gate, down)
    )
    for index in torch.arange(len(token)).split(EXPERT_TOKENS):
        tokens, weight = token[index], routed.weight[token[index], slot[index], None]
        x = routed.inputs.rows(tokens).to(gate.device)
        inner = layers.swiglu(config, product(x, gate), product(x, up))
        counted = levelled(inner)
        inputs.down.add(counted)
        if needs:
            inputs.hidden_rows.append(x.cpu()[keep_hidden[index]] * weight[keep_hidden[index]])
            inputs.inner_rows.append(counted.cpu()[keep_inner[index]] * weight[keep_inner[index]])
        if routed.out is not None:
            routed.add(tokens, product(inner, down).cpu() * weight)
    return inputs


def evenly_spaced(count: int, limit: int) -> torch.Tensor:
    """bool [count]: True for `limit` of them, evenly spaced."""
    mask = torch.zeros(count, dtype=torch.bool)
    mask[spread(torch.arange(count), limit)] = True
    return mask
