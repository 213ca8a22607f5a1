"""Tensors of another place, with everything that belongs to them: only the source tells."""

from __future__ import annotations

import re
from random import Random

import torch

from tests.verify.mutations.kinds_source import quantized, wrong
from tests.verify.mutations.mutator import Place, kind, pick
from tests.verify.support.editor import Checkpoint
from tests.verify.support.integers import integers, linear, weight_scale


def moved(ck: Checkpoint, source: str, target: str) -> dict[str, torch.Tensor | None]:
    """The tensors under prefix `source`, to be stored under `target`."""
    return {target + name[len(source) :]: ck.read(name) for name in ck.names(rf"^{re.escape(source)}\.")}


def modules_under(ck: Checkpoint, *prefixes: str) -> Place:
    return wrong(ck, *(m for m in ck.modules() if m.startswith(tuple(f"{prefix}." for prefix in prefixes))))


@kind(against=True)
def experts_permuted(ck: Checkpoint, chance: Random) -> Place:
    """All experts of a layer, by name: the router no longer means the same ones."""
    layer = pick(chance, ck.experts()).rpartition(".")[0]
    old = [expert for expert in ck.experts() if expert.startswith(f"{layer}.")]
    by = chance.randrange(1, len(old))
    changes: dict[str, torch.Tensor | None] = {}
    for source, target in zip(old, old[by:] + old[:by], strict=True):
        changes |= moved(ck, source, target)
    ck.store(changes)
    return modules_under(ck, *old)


@kind(against=True)
def weights_of_two_linears_swapped(ck: Checkpoint, chance: Random) -> Place:
    """One shape, one type, anywhere in the model, with everything that belongs to them."""
    first = pick(chance, [m for m in quantized(ck) if twins(ck, m)])
    second = pick(chance, twins(ck, first))
    names = ["weight", "weight_scale", "scale_bias"]
    if ck.kind(f"{first}.weight") == "W8A8":  # the input belongs to the place, not to the weight
        changes = linear(ck, first, integers(ck, second), weight_scale(ck, second))
        changes |= linear(ck, second, integers(ck, first), weight_scale(ck, first))
    else:
        both = ((first, second), (second, first))
        changes = {f"{a}.{s}": ck.read(f"{b}.{s}") for a, b in both for s in names if f"{b}.{s}" in ck.file_of}
    ck.store(changes)
    return wrong(ck, first, second)


def twins(ck: Checkpoint, module: str) -> list[str]:
    facts = ck.kind(f"{module}.weight"), ck.shape(f"{module}.weight")
    down = module.endswith("down_proj")
    return [
        other
        for other in quantized(ck)
        if other != module and (ck.kind(f"{other}.weight"), ck.shape(f"{other}.weight")) == facts
        if other.endswith("down_proj") == down
    ]
