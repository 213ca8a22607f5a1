"""msModelSlim's own recipe files: they name layers by the numbers of the 744B model, ours may be another."""

from __future__ import annotations

import re

from glm5_ascend.errors import RecipeError
from glm5_ascend.model.config import ModelConfig
from glm5_ascend.quantize.recipe import Fa3Quant, Group, Quarot, Recipe, Selection

_LITERAL = re.compile(r"model\.layers\.(\d+)")


def check_literal_layers(recipe: Recipe, config: ModelConfig) -> None:
    """Refuse a `modelslim_v1` recipe whose layer numbers are not this model's dense and MTP layers.

    In these files a number always means "the dense layers" or "the MTP layer" (the layers of an INT8 cache apart): on a
    model of another depth the same number would silently hit something else.

    Raises:
        RecipeError: names the patterns and the symbolic ones that mean the same on every model.
    """
    if recipe.apiversion != "modelslim_v1":
        return
    dense = {i for i in range(config.num_hidden_layers) if not config.is_moe(i)}
    mtp = set(range(config.num_hidden_layers, config.num_layers_with_mtp))
    for step in recipe.spec.process:
        for selection in step.configs if isinstance(step, Group) else (step,):
            if isinstance(selection, Quarot | Fa3Quant):
                continue
            named = _numbers(selection)
            if named and named not in (dense, mtp, dense | mtp):
                raise RecipeError(
                    f"recipe {recipe.metadata.config_id}: step {selection.type}: layers "
                    f"{', '.join(map(str, sorted(named)))} are named, but in this model the dense layers are "
                    f"{_list(dense)} and the MTP layers {_list(mtp)}",
                    "write model.layers.{dense}.* and model.layers.{mtp}.* instead of numbers",
                )


def _numbers(selection: Selection) -> set[int]:
    patterns = (*selection.include, *selection.exclude)
    return {int(number) for pattern in patterns for number in _LITERAL.findall(pattern)}


def _list(numbers: set[int]) -> str:
    return ", ".join(map(str, sorted(numbers))) or "none"
