"""One routed expert: read, fuse, rotate, run on its tokens, search its scale, round, write, free."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from glm5_ascend.checkpoint import structure as S
from glm5_ascend.device import product
from glm5_ascend.quantize.forward import SEARCH_ROWS, Routed
from glm5_ascend.quantize.plan import Plan
from glm5_ascend.quantize.smoothing import search_scale
from glm5_ascend.quantize.statistics import InputStatistics
from glm5_ascend.quantize.store import Store, WeightErrors
from glm5_ascend.quantize.transforms import Tensors, move_scale
from glm5_ascend.quantize.weights import FloatWeights

#: An expert that saw fewer tokens keeps its scales: a search on them would fit noise. It is reported.
COLD_EXPERT_TOKENS = 8
#: Tokens an expert works on at a time.
CHUNK = 512


def quantize_expert(
    plan: Plan, source: FloatWeights, store: Store, layer: int, expert: int, gains: Tensors, routed: Routed | None
) -> dict[str, Any]:
    """Write one expert and add its output to the stream; returns {"cold": bool, "errors": sums by scheme}."""
    prefix, parts = S.layer_prefix(layer), S.expert_linears(expert)
    tensors = source.load_all(prefix, parts, gains)
    cold = False
    if routed is not None:
        seen = run_expert(tensors, expert, routed)
        for search in plan.smoothing(layer, [S.expert_subgraph(expert)]):
            cold = seen.tokens < COLD_EXPERT_TOKENS
            if not cold:
                scale = search_scale([tensors[f"{search.subgraph.targets[0]}.weight"]], seen, search)
                move_scale(tensors, plan.config, search.subgraph, scale)
    errors = WeightErrors()
    for part in parts:
        errors.include(store.write(prefix, part, tensors.pop(S.tensor_name(part))).sums())
    return {"cold": cold, "errors": errors.sums()}


def rerun_expert(source: FloatWeights, layer: int, expert: int, gains: Tensors, routed: Routed) -> None:
    """Only the expert's output: for an expert that a stopped run had written already."""
    run_expert(source.load_all(S.layer_prefix(layer), S.expert_linears(expert), gains), expert, routed)


def run_expert(tensors: Tensors, expert: int, routed: Routed) -> InputStatistics:
    """Add the expert's output to the stream; returns the statistics of its down_proj's input."""
    gate, up, down = (tensors[S.tensor_name(part)] for part in S.expert_linears(expert))
    seen = InputStatistics(SEARCH_ROWS)
    token, slot = torch.where(routed.ids == expert)
    for chosen, at in zip(token.split(CHUNK), slot.split(CHUNK), strict=True):
        x = routed.inputs.gather(chosen).to(gate.device)
        inner = F.silu(product(x, gate)) * product(x, up)
        seen.add(inner)
        if routed.out is not None:
            routed.out.add(chosen, product(inner, down).cpu() * routed.weight[chosen, at, None])
    return seen
