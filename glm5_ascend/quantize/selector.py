"""Which modules a recipe step selects."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable

from glm5_ascend.errors import RecipeError
from glm5_ascend.model.config import ModelConfig
from glm5_ascend.quantize.recipe import Selection


def symbols(config: ModelConfig) -> dict[str, list[int]]:
    """What `{mtp}`, `{dense}` and `{moe}` in a recipe stand for."""
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
