"""Quantization recipes: a YAML file, checked key by key, close to msModelSlim's `modelslim_v1` schema.

Module patterns are shell globs over full module names; `{mtp}`, `{dense}` and `{moe}` stand for the layer numbers that
config.json gives those kinds, so one recipe fits every size. Every key is described in quant_recipes/README.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from glm5_ascend.checkpoint import schemes
from glm5_ascend.errors import RecipeError
from glm5_ascend.resources import data_dir

RECIPE_DIR = "data/quant_recipes"


class _RecipePart(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class QuantizerConfig(_RecipePart):
    """How one side (activation or weight) of a linear is rounded."""

    scope: Literal["per_token", "per_tensor", "per_channel"]
    dtype: Literal["int8", "int4"]
    symmetric: bool
    method: Literal["minmax", "ssz", "gptq"] = "minmax"
    ext: dict[str, int] = Field(default_factory=dict)  # ssz: {step: N}


class QConfig(_RecipePart):
    act: QuantizerConfig
    weight: QuantizerConfig

    @property
    def scheme(self) -> str | None:
        """The format's type for this pair, None if the format has none."""
        act = (self.act.scope, self.act.dtype, self.act.symmetric)
        weight = (self.weight.scope, self.weight.dtype, self.weight.symmetric)
        return {
            (("per_token", "int8", True), ("per_channel", "int8", True)): schemes.W8A8_DYNAMIC,
            (("per_tensor", "int8", False), ("per_channel", "int8", True)): schemes.W8A8,
            (("per_token", "int8", True), ("per_channel", "int4", True)): schemes.W4A8_DYNAMIC,
        }.get((act, weight))


class Selection(_RecipePart):
    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()


class Quarot(_RecipePart):
    type: Literal["quarot"]
    online: Literal[False] = False
    block_size: Literal[-1] = -1
    max_tp_size: int = 4  # accepted for msModelSlim's files; nothing depends on it offline
    export_extra_info: Literal[True] = True


class FlexAwqSsz(Selection):
    type: Literal["flex_awq_ssz"]
    qconfig: QConfig | None = None
    enable_subgraph_type: tuple[Literal["up-down"], ...] = ("up-down",)


class FlexSmoothQuant(Selection):
    type: Literal["flex_smooth_quant"]
    enable_subgraph_type: tuple[Literal["norm-linear", "ov", "up-down"], ...] = ("norm-linear", "ov", "up-down")


class LinearQuant(Selection):
    type: Literal["linear_quant"]
    qconfig: QConfig


class Group(_RecipePart):
    type: Literal["group"]
    configs: tuple[LinearQuant, ...]


class Fa3Quant(Selection):
    """INT8 indexer caches (C8): the engine quantizes them itself, the description only names the layers."""

    type: Literal["fa3_quant"]
    qconfig: QuantizerConfig

    @model_validator(mode="after")
    def _int8_per_token(self) -> Fa3Quant:
        if (self.qconfig.scope, self.qconfig.dtype, self.qconfig.symmetric) != ("per_token", "int8", True):
            raise ValueError("indexer caches are INT8, per_token, symmetric, or not quantized")
        return self


Step = Annotated[Quarot | FlexAwqSsz | FlexSmoothQuant | Fa3Quant | LinearQuant | Group, Field(discriminator="type")]


class Saver(_RecipePart):
    type: Literal["ascendv1_saver"]
    part_file_size: float = Field(default=4, gt=0, le=4)  # GiB


class Metadata(_RecipePart):
    config_id: str
    format_version: Literal[1] = 1
    score: float | None = None
    verified_tags: dict[str, Any] | None = None
    label: dict[str, Any] | None = None


class Spec(_RecipePart):
    process: tuple[Step, ...]
    dataset: str = "default"
    save: tuple[Saver, ...] = (Saver(type="ascendv1_saver"),)


class Recipe(_RecipePart):
    """One recipe; `steps` flattens groups."""

    apiversion: Literal["glm5_ascend_v1", "modelslim_v1"]
    metadata: Metadata
    spec: Spec

    @property
    def rotates(self) -> bool:
        return any(isinstance(step, Quarot) for step in self.spec.process)

    @property
    def linear_steps(self) -> tuple[LinearQuant, ...]:
        found: list[LinearQuant] = []
        for step in self.spec.process:
            if isinstance(step, Group):
                found += step.configs
            elif isinstance(step, LinearQuant):
                found.append(step)
        return tuple(found)

    @property
    def cache_steps(self) -> tuple[Fa3Quant, ...]:
        return tuple(step for step in self.spec.process if isinstance(step, Fa3Quant))

    @property
    def smoothing_steps(self) -> tuple[FlexAwqSsz | FlexSmoothQuant, ...]:
        return tuple(s for s in self.spec.process if isinstance(s, FlexAwqSsz | FlexSmoothQuant))


def find_recipe(name: str) -> Path:
    """A shipped recipe by name (`w4a8`), or a path to a YAML file."""
    shipped = data_dir(RECIPE_DIR)
    for path in (Path(name), shipped / f"{name}.yaml"):
        if path.is_file():
            return path
    known = ", ".join(sorted(p.stem for p in shipped.glob("*.yaml")))
    raise RecipeError(f"recipe {name!r}: no such file and no shipped recipe of this name", f"shipped recipes: {known}")


def load_recipe(path: Path) -> Recipe:
    """Read and check a recipe.

    Raises:
        RecipeError: names file, line and key of the first thing that cannot be honoured.
    """
    try:
        text = path.read_text(encoding="utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        raw = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read: {error}", "give a recipe name or a YAML file") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}" if mark else ""
        raise RecipeError(
            f"{path}{where}: not valid YAML: {getattr(error, 'problem', error)}", "correct the line"
        ) from None
    if isinstance(raw, dict) and raw.get("apiversion") == "modelslim_v1":
        # msModelSlim's files keep the anchors of their qconfigs in further top-level keys.
        raw = {key: raw[key] for key in ("apiversion", "metadata", "spec") if key in raw}
    try:
        recipe = Recipe.model_validate(raw)
    except ValidationError as error:
        raise _explain(path, node, error) from None
    _check_schemes(path, node, recipe)
    return recipe


def _explain(path: Path, node: Any, error: ValidationError) -> RecipeError:
    first = error.errors()[0]
    location = tuple(part for part in first["loc"] if part not in _STEP_TYPES)
    key = ".".join(str(part) for part in location) or "the file"
    message = {
        "extra_forbidden": "unknown key",
        "missing": "key is missing",
        "union_tag_invalid": f"unknown step type; known: {', '.join(sorted(_STEP_TYPES))}",
        "union_tag_not_found": f"step without a type; known: {', '.join(sorted(_STEP_TYPES))}",
    }.get(first["type"], f"{first['msg']}, got {first['input']!r:.60}")
    return RecipeError(f"{path}:{_line(node, location)}: {key}: {message}", "see quant_recipes/README.md for every key")


_STEP_TYPES = {"quarot", "flex_awq_ssz", "flex_smooth_quant", "fa3_quant", "linear_quant", "group"}


def _line(node: Any, location: tuple[int | str, ...]) -> int:
    """Line (from 1) of the deepest part of `location` that exists in the YAML tree."""
    for part in location:
        children = node.value if isinstance(node, yaml.MappingNode | yaml.SequenceNode) else []
        if isinstance(node, yaml.MappingNode):
            found = next(((k, v) for k, v in children if k.value == part), None)
            if found is None:
                break
            if part == location[-1]:
                return int(found[0].start_mark.line) + 1
            node = found[1]
        elif isinstance(part, int) and part < len(children):
            node = children[part]
        else:
            break
    return int(node.start_mark.line) + 1 if node is not None else 1


def _check_schemes(path: Path, node: Any, recipe: Recipe) -> None:
    for index, step in enumerate(recipe.spec.process):
        here: list[tuple[tuple[int | str, ...], QConfig | None]] = []
        base: tuple[int | str, ...] = ("spec", "process", index)
        if isinstance(step, Group):
            here = [((*base, "configs", i, "qconfig"), config.qconfig) for i, config in enumerate(step.configs)]
        elif isinstance(step, LinearQuant | FlexAwqSsz):
            here = [((*base, "qconfig"), step.qconfig)]
        for location, qconfig in here:
            if qconfig is not None and qconfig.scheme is None:
                raise RecipeError(
                    f"{path}:{_line(node, location)}: {'.'.join(map(str, location))}: "
                    "the format has no type for this pair of activation and weight",
                    "W8A8_DYNAMIC, W8A8 (static) and W4A8_DYNAMIC are in quant_recipes/README.md",
                )
