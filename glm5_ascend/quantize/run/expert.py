"""One routed expert: read, fuse, rotate, run on its tokens, search its scale, round, write, free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from glm5_ascend.model import structure
from glm5_ascend.model.device import product
from glm5_ascend.quantize.calibration.forward import SEARCH_ROWS, Routed
from glm5_ascend.quantize.methods.error_feedback import Feedback, kept
from glm5_ascend.quantize.methods.input_statistics import InputStatistics, spread
from glm5_ascend.quantize.methods.smoothing import search_scale
from glm5_ascend.quantize.methods.transforms import Tensors, move_scale
from glm5_ascend.quantize.plan import Plan
from glm5_ascend.quantize.run.source_weights import FloatWeights
from glm5_ascend.quantize.run.writer import Store, WeightErrors

#: An expert that saw fewer tokens keeps its scales: a search on them would fit noise. It is reported.
COLD_EXPERT_TOKENS = 8
#: Tokens an expert works on at a time.
CHUNK = 512


@dataclass
class Inputs:
    """What an expert's linears read: statistics of down_proj's input and, weighted as the router weighs the expert's
    output, whole rows of both inputs for error feedback, on the host."""

    down: InputStatistics
    hidden_rows: list[torch.Tensor] = field(default_factory=list)
    inner_rows: list[torch.Tensor] = field(default_factory=list)

    def feedback(
        self, scale: torch.Tensor | None, outer_steps: int, inner_steps: int
    ) -> tuple[Feedback | None, Feedback | None]:
        """Of gate_proj and up_proj, and of down_proj, whose input is divided by `scale`."""
        inner = torch.cat(self.inner_rows)
        inner = inner if scale is None else inner / scale.cpu()
        return Feedback.on(torch.cat(self.hidden_rows), outer_steps), Feedback.on(inner, inner_steps)


def quantize_expert(
    plan: Plan, source: FloatWeights, store: Store, layer: int, expert: int, gains: Tensors, routed: Routed | None
) -> dict[str, Any]:
    """Write one expert and add its output to the stream; returns {"cold": bool, "errors": sums by scheme}.

    A cold expert is rounded to nearest: what so few tokens say is noise.
    """
    prefix, parts = structure.layer_prefix(layer), structure.expert_linears(expert)
    tensors = source.load_all(prefix, parts, gains)
    compensated = plan.compensated(prefix, parts)
    cold, feedback = False, dict[str, Feedback | None]()
    if routed is not None:
        seen = run_expert(tensors, expert, routed, bool(compensated))
        searches = list(plan.smoothing(layer, [structure.expert_subgraph(expert)]))
        cold = seen.down.tokens < COLD_EXPERT_TOKENS and bool(searches or compensated)
        scale = None
        for search in searches if not cold else []:
            scale = search_scale([tensors[f"{search.subgraph.targets[0]}.weight"]], seen.down, search)
            move_scale(tensors, plan.config, search.subgraph, scale)
        if compensated and not cold:
            outer, inner = seen.feedback(scale, *(plan.linears[prefix + part.name].steps for part in parts[1:]))
            feedback = {part.name: inner if part is parts[2] else outer for part in parts if part.name in compensated}
    errors = WeightErrors()
    for part in parts:
        weight = tensors.pop(structure.tensor_name(part))
        errors.include(store.write(prefix, part, weight, feedback.get(part.name)).sums())
    return {"cold": cold, "errors": errors.sums()}


def rerun_expert(source: FloatWeights, layer: int, expert: int, gains: Tensors, routed: Routed) -> None:
    """Only the expert's output: for an expert that a stopped run had written already."""
    run_expert(source.load_all(structure.layer_prefix(layer), structure.expert_linears(expert), gains), expert, routed)


def run_expert(tensors: Tensors, expert: int, routed: Routed, rows: bool = False) -> Inputs:
    """Add the expert's output to the stream; returns what its linears read, with whole rows if `rows`."""
    gate, up, down = (tensors[structure.tensor_name(part)] for part in structure.expert_linears(expert))
    seen = Inputs(InputStatistics(SEARCH_ROWS))
    token, slot = torch.where(routed.ids == expert)
    keep_hidden, keep_inner = (spread_mask(len(token), kept(len(token), w.shape[1])) for w in (gate, down))
    for at in torch.arange(len(token)).split(CHUNK):
        chosen, weight = token[at], routed.weight[token[at], slot[at], None]
        x = routed.inputs.gather(chosen).to(gate.device)
        inner = F.silu(product(x, gate)) * product(x, up)
        seen.down.add(inner)
        if rows:
            for found, keep, to in ((x, keep_hidden[at], seen.hidden_rows), (inner, keep_inner[at], seen.inner_rows)):
                to.append(found.cpu()[keep] * weight[keep])
        if routed.out is not None:
            routed.out.add(chosen, product(inner, down).cpu() * weight)
    return seen


def spread_mask(count: int, limit: int) -> torch.Tensor:
    """bool [count]: True for `limit` of them, evenly spaced."""
    chosen = torch.zeros(count, dtype=torch.bool)
    chosen[spread(torch.arange(count), limit)] = True
    return chosen
