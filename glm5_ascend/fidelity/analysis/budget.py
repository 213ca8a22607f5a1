"""Units that get more bits within a budget of bytes: greedy by noise removed per byte."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from glm5_ascend.errors import RecipeError
from glm5_ascend.fidelity.analysis.units import Unit, fallbacks
from glm5_ascend.report.units import format_bytes


@dataclass(frozen=True)
class Fallback:
    """One step of one unit, from type `before` to `after`.

    Attributes:
        gain: energy of noise that it removes, relative to the stream. nbytes: bytes that it adds.
    """

    unit: Unit
    before: str
    after: str
    gain: float
    nbytes: int


def propose(units: Iterable[Unit], output_bytes: int, budget: int) -> list[Fallback]:
    """Fall-backs in the order they are taken; the last one of a unit gives its type.

    Args:
        output_bytes: size of the output without fall-backs.
    Raises:
        RecipeError: the recipe alone is larger than the budget.
    """
    if output_bytes > budget:
        raise RecipeError(
            f"--budget of {budget} bytes: the recipe alone makes {output_bytes} ({format_bytes(output_bytes)})",
            "raise the budget, or analyze a smaller recipe",
        )
    steps: list[Fallback] = []
    available = {id(unit): step for unit in units if (step := _next_step(unit, unit.scheme)) is not None}
    while True:
        affordable = [step for step in available.values() if output_bytes + step.nbytes <= budget]
        if not affordable:
            return steps
        best = max(affordable, key=lambda step: step.gain / max(1, step.nbytes))
        steps.append(best)
        output_bytes += best.nbytes
        following = _next_step(best.unit, best.after)
        if following is None:
            del available[id(best.unit)]
        else:
            available[id(best.unit)] = following


def _next_step(unit: Unit, scheme: str) -> Fallback | None:
    """The step to the next larger type; None if it removes no noise."""
    for after in fallbacks(unit.scheme):
        if unit.nbytes[after] > unit.nbytes[scheme]:
            gain = unit.noise[scheme] - unit.noise[after]
            return Fallback(unit, scheme, after, gain, unit.nbytes[after] - unit.nbytes[scheme]) if gain > 0 else None
    return None


def final_types(steps: Iterable[Fallback]) -> list[tuple[Unit, str]]:
    """Units that change and their new types, by layer."""
    last = {id(step.unit): (step.unit, step.after) for step in steps}
    return sorted(last.values(), key=lambda item: (item[0].layer, item[0].label))
