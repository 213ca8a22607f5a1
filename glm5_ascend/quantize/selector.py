"""Modules that a recipe step selects, and the layer numbers in msModelSlim's recipe files."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable

from glm5_ascend.errors import RecipeError
from glm5_ascend.model.config import ModelConfig
from glm5_ascend.model.spec import Linear
from glm5_ascend.quantize.recipe import Fa3Quant, LinearQuant, Recipe, Selection


def symbols(config: ModelConfig) -> dict[str, list[int]]:
    """Layer numbers of `{mtp}`, `{dense}` and `{moe}` in a recipe."""
    main = range(config.num_hidden_layers)
    return {
        "mtp": list(range(config.num_hidden_layers, config.num_layers_with_mtp)),
        "dense": [layer for layer in main if not config.is_moe(layer)],
        "moe": [layer for layer in main if config.is_moe(layer)],
    }


class Selector:
    """Compiled include/exclude patterns of a recipe step; `{mtp}`, `{dense}`, `{moe}` become layer numbers."""

    def __init__(self, selection: Selection, config: ModelConfig) -> None:
        self.numbers = symbols(config)
        self.include = self._compile(selection.include)
        self.exclude = self._compile(selection.exclude)
        self.selection = selection

    def _compile(self, patterns: Iterable[str]) -> re.Pattern[str]:
        return re.compile("|".join(self._regex(p) for p in patterns) or r"(?!)")

    def _regex(self, pattern: str) -> str:
        out = ""
        for piece in re.split(r"(\{\w+\})", pattern):
            if piece.startswith("{"):
                if piece[1:-1] not in self.numbers:
                    raise RecipeError(
                        f"recipe: pattern {pattern!r}: unknown selector {piece}", "known: {mtp} {dense} {moe}"
                    )
                out += f"(?:{'|'.join(map(str, self.numbers[piece[1:-1]])) or '(?!)'})"
            else:
                out += fnmatch.translate(piece).removeprefix("(?s:").removesuffix(r")\Z")
        return rf"(?s:{out})\Z"

    def __call__(self, module: str) -> bool:
        return bool(self.include.match(module)) and not self.exclude.match(module)

    def unmatched(self, modules: Iterable[str]) -> list[str]:
        """Patterns that match none of these names, without those of a kind of layer that the model does not have."""
        patterns = [
            pattern
            for pattern in (*self.selection.include, *self.selection.exclude)
            if all(self.numbers[symbol] for symbol in re.findall(r"\{(\w+)\}", pattern))
        ]
        compiled = {pattern: self._compile([pattern]) for pattern in patterns}
        names = tuple(modules)
        return [pattern for pattern, regex in compiled.items() if not any(map(regex.match, names))]


def without_effect(recipe: Recipe, config: ModelConfig) -> list[str]:
    """One sentence for each pattern of a recipe that matches no module, and for each step that selects nothing."""
    weights = [(prefix + weight.name, weight) for prefix, weight in config.all_weights()]
    parents = {name.rpartition(".")[0] for name, _ in weights}
    modules = {name for name, _ in weights} | parents | {name.rpartition(".")[0] for name in parents}
    linears = [name for name, weight in weights if isinstance(weight, Linear)]
    indexers = [
        config.spec.layer_prefix(layer) + config.spec.indexer
        for layer in range(config.num_layers_with_mtp)
        if config.has_indexer(layer)
    ]
    sentences = []
    if recipe.spec.runner is not None:
        sentences.append(f"runner {recipe.spec.runner!r:.40} has no effect: layers are always quantized one by one")
    for step in recipe.selections:
        selects = Selector(step, config)
        if lost := selects.unmatched(modules):
            sentences.append(
                f"step {step.type}: {', '.join(map(repr, lost))} matches no module of this model: no effect"
            )
        if isinstance(step, Fa3Quant) and not any(map(selects, indexers)):
            sentences.append(
                f"step {step.type} (include {list(step.include)}) selects no indexer: no INT8 cache comes from it; "
                "INT8 latents are a switch of the engine (additional_config enable_sparse_sfa_c8)"
            )
        elif isinstance(step, LinearQuant) and not any(map(selects, linears)):
            sentences.append(f"step {step.type} (include {list(step.include)}) selects no linear: it quantizes nothing")
    return sentences


_LITERAL = re.compile(r"model\.layers\.(\d+)")


def check_literal_layers(recipe: Recipe, config: ModelConfig) -> None:
    """Refuse a `modelslim_v1` recipe whose layer numbers are not this model's dense and MTP layers.

    In these files a number always means "the dense layers" or "the MTP layer" (the layers of an INT8 cache apart): on a
    model of another depth the same number would silently hit something else.

    Raises:
        RecipeError: names the patterns and the symbolic ones that mean the same on every model.
    """
    if not recipe.is_stock:
        return
    numbers = symbols(config)
    dense, mtp = set(numbers["dense"]), set(numbers["mtp"])
    for step in recipe.selections:
        patterns = () if isinstance(step, Fa3Quant) else (*step.include, *step.exclude)
        named = {int(layer) for pattern in patterns for layer in _LITERAL.findall(pattern)}
        if named and named not in (dense, mtp, dense | mtp):
            raise RecipeError(
                f"recipe {recipe.metadata.config_id}: step {step.type}: layers {_list(named)} are named, but in this "
                f"model the dense layers are {_list(dense)} and the MTP layers {_list(mtp)}",
                "write model.layers.{dense}.* and model.layers.{mtp}.* instead of numbers",
            )


def _list(numbers: set[int]) -> str:
    return ", ".join(map(str, sorted(numbers))) or "none"
