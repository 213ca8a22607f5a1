"""One routed expert: read, fuse, rotate, run on its tokens, search its scale, round, write, free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F

from glm5_ascend.model.spec import Linear
from glm5_ascend.quantize.calibration.forward import Routed
from glm5_ascend.quantize.calibration.product import product
from glm5_ascend.quantize.limits import EXPERT_TOKENS, SEARCH_ROWS
from glm5_ascend.quantize.methods.error_feedback import Feedback, Rounding, rows_kept
from glm5_ascend.quantize.methods.input_statistics import InputStatistics, spread
from glm5_ascend.quantize.methods.smoothing import search_scale
from glm5_ascend.quantize.methods.transforms import Tensors, move_scale
from glm5_ascend.quantize.plan import QuantizationPlan
from glm5_ascend.quantize.run.blocks import WeightErrors
from glm5_ascend.quantize.run.job import RunContext
from glm5_ascend.quantize.run.journal import UnitRecord
from glm5_ascend.quantize.run.source_weights import FloatWeights

#: An expert that saw fewer tokens keeps its scales: a search on them would fit noise. It is reported.
COLD_EXPERT_TOKENS = 8


@dataclass
class ExpertInputs:
    """What an expert's linears read.

    Attributes:
        down: statistics of down_proj's input.
        hidden_rows, inner_rows: whole rows of both inputs, weighted as the router weighs the expert's output, for
            error feedback; on the host.
    """

    down: InputStatistics
    hidden_rows: list[torch.Tensor] = field(default_factory=list)
    inner_rows: list[torch.Tensor] = field(default_factory=list)


class SmoothedExpert(NamedTuple):
    """An expert whose weights are ready to be rounded.

    Attributes:
        inputs: what its linears read, before smoothing.
        scale: fp32 [moe_intermediate_size] that down_proj's input is divided by; None where nothing was moved.
        feedback: by linear, for those that are rounded with error feedback.
        cold: too few tokens for what the plan wanted to search.
    """

    inputs: ExpertInputs
    scale: torch.Tensor | None
    feedback: dict[str, Feedback | None]
    cold: bool


def smooth_expert(plan: QuantizationPlan, tensors: Tensors, layer: int, expert: int, routed: Routed) -> SmoothedExpert:
    """Run an expert in float on its tokens, move its scale in `tensors`, and prepare its error feedback.

    A cold expert is rounded to nearest: what so few tokens say is noise.
    """
    prefix, parts = plan.config.spec.layer_prefix(layer), plan.config.spec.expert_linears(expert)
    compensated = plan.compensated(prefix, parts)
    inputs = run_expert(tensors, parts, expert, routed, keep_rows=bool(compensated))
    searches = list(plan.smoothing(layer, [plan.config.spec.expert_subgraph(expert)]))
    if inputs.down.tokens < COLD_EXPERT_TOKENS:
        return SmoothedExpert(inputs, None, {}, bool(searches or compensated))
    scale = None
    for search in searches:
        found = search_scale([tensors[f"{search.subgraph.targets[0]}.weight"]], inputs.down, search)
        scale = move_scale(tensors, plan.config, search.subgraph, found)
    steps = {name: plan.linears[prefix + name].steps for name in compensated}
    return SmoothedExpert(inputs, scale, _feedback(inputs, scale, parts, steps), False)


def _feedback(
    inputs: ExpertInputs, scale: torch.Tensor | None, parts: Sequence[Linear], steps: dict[str, int]
) -> dict[str, Feedback | None]:
    """By linear of `steps` (name: steps of descent); gate_proj and up_proj read the same, so equal steps share one."""
    gate, up, down = (part.name for part in parts)
    made: dict[str, Feedback | None] = {}
    if steps.keys() & {gate, up}:
        hidden = torch.cat(inputs.hidden_rows)
        shared = {count: Feedback.on(hidden, count) for count in {steps[name] for name in (gate, up) if name in steps}}
        made |= {name: shared[steps[name]] for name in (gate, up) if name in steps}
    if down in steps:
        inner = torch.cat(inputs.inner_rows)
        made[down] = Feedback.on(inner if scale is None else inner / scale.cpu(), steps[down])
    return made


def quantize_expert(run: RunContext, layer: int, expert: int, gains: Tensors, routed: Routed | None) -> UnitRecord:
    """Write one expert and add its output to the stream."""
    spec = run.plan.config.spec
    prefix, parts = spec.layer_prefix(layer), spec.expert_linears(expert)
    tensors = run.weights.load_all(prefix, parts, gains)
    smoothed = None if routed is None else smooth_expert(run.plan, tensors, layer, expert, routed)
    feedback: dict[str, Rounding | None] = {} if smoothed is None else {**smoothed.feedback}
    errors = WeightErrors()
    for part in parts:
        weight = tensors.pop(part.tensor_name)
        errors.include(run.store.write(prefix, part, weight, feedback.get(part.name)).sums())
    return UnitRecord(errors.sums(), cold=smoothed is not None and smoothed.cold)


def rerun_expert(source: FloatWeights, layer: int, expert: int, gains: Tensors, routed: Routed) -> None:
    """Only the expert's output: for an expert that a stopped run had written already."""
    spec = source.source.config.spec
    parts = spec.expert_linears(expert)
    run_expert(source.load_all(spec.layer_prefix(layer), parts, gains), parts, expert, routed)


def run_expert(
    tensors: Tensors, parts: Sequence[Linear], expert: int, routed: Routed, keep_rows: bool = False
) -> ExpertInputs:
    """Add the expert's output to the stream; returns what its linears read, with whole rows if `keep_rows`."""
    gate, up, down = (tensors[part.tensor_name] for part in parts)
    token, slot = torch.where(routed.ids == expert)
    inputs = ExpertInputs(InputStatistics(SEARCH_ROWS, len(token)))
    keep_hidden, keep_inner = (evenly(len(token), rows_kept(len(token), w.shape[1])) for w in (gate, down))
    for at in torch.arange(len(token)).split(EXPERT_TOKENS):
        chosen, weight = token[at], routed.weight[token[at], slot[at], None]
        x = routed.inputs.gather(chosen).to(gate.device)
        inner = F.silu(product(x, gate)) * product(x, up)
        inputs.down.add(inner)
        if keep_rows:
            inputs.hidden_rows.append(x.cpu()[keep_hidden[at]] * weight[keep_hidden[at]])
            inputs.inner_rows.append(inner.cpu()[keep_inner[at]] * weight[keep_inner[at]])
        if routed.out is not None:
            routed.out.add(chosen, product(inner, down).cpu() * weight)
    return inputs


def evenly(count: int, limit: int) -> torch.Tensor:
    """bool [count]: True for `limit` of them, evenly spaced."""
    chosen = torch.zeros(count, dtype=torch.bool)
    chosen[spread(torch.arange(count), limit)] = True
    return chosen
