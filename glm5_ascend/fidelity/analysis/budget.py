"""Which units to give more bits: greedy by noise removed per byte, within a budget."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from glm5_ascend.errors import RecipeError
from glm5_ascend.fidelity.analysis.layer import AnalyzedLayer
from glm5_ascend.fidelity.analysis.units import Unit, fallbacks
from glm5_ascend.quantize.recipe import FallbackRules
from glm5_ascend.report.units import format_bytes


@dataclass(frozen=True)
class Fallback:
    """One step of one unit: from type `before` to `after`. gain: energy of noise it removes, relative to the stream."""

    unit: Unit
    before: str
    after: str
    gain: float
    nbytes: int


def wide_caches(found: Iterable[AnalyzedLayer], rules: FallbackRules | None) -> list[int]:
    """Layers whose indexer cache changes more keys than the rules allow; none without rules."""
    most = 1.0 if rules is None else rules.keys_lost
    return [layer.layer for layer in found if rules is not None and layer.cache and layer.cache.lost > most]


def propose(units: Iterable[Unit], spent: int, budget: int) -> list[Fallback]:
    """Steps in the order they are taken; each unit's last one is its type.

    Args:
        spent: bytes of the output as the recipe has it. budget: bytes it may have.
    Raises:
        RecipeError: the recipe alone is larger than the budget.
    """
    if spent > budget:
        raise RecipeError(
            f"--budget of {budget} bytes: the recipe alone makes {spent} ({format_bytes(spent)})",
            "raise the budget, or analyze a smaller recipe",
        )
    chosen: list[Fallback] = []
    waiting = {id(unit): step for unit in units if (step := _next(unit, unit.scheme)) is not None}
    while True:
        fitting = [step for step in waiting.values() if spent + step.nbytes <= budget]
        if not fitting:
            return chosen
        best = max(fitting, key=lambda step: step.gain / max(1, step.nbytes))
        chosen.append(best)
        spent += best.nbytes
        following = _next(best.unit, best.after)
        if following is None:
            del waiting[id(best.unit)]
        else:
            waiting[id(best.unit)] = following


def _next(unit: Unit, scheme: str) -> Fallback | None:
    """The next step of a unit; a step that removes nothing is left out, and so is what would follow."""
    for after in fallbacks(unit.scheme):
        if unit.nbytes[after] > unit.nbytes[scheme]:
            gain = unit.noise[scheme] - unit.noise[after]
            return Fallback(unit, scheme, after, gain, unit.nbytes[after] - unit.nbytes[scheme]) if gain > 0 else None
    return None


def final_types(steps: Iterable[Fallback]) -> list[tuple[Unit, str]]:
    """Every unit that changes and the type it ends with, by layer."""
    last = {id(step.unit): (step.unit, step.after) for step in steps}
    return sorted(last.values(), key=lambda item: (item[0].layer, item[0].label))
