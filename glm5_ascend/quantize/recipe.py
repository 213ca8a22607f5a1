"""Quantization recipes: a YAML file, checked key by key, close to msModelSlim's `modelslim_v1` schema.

Module patterns are shell globs over full module names; `{mtp}`, `{dense}` and `{moe}` stand for the layer numbers that
config.json gives those kinds, so one recipe fits every size. Every key is described in quant_recipes/README.md.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema, model_validator

from glm5_ascend.checkpoint import schemes
from glm5_ascend.errors import RecipeError, shown
from glm5_ascend.files.resources import data_dir, near, write_schemas
from glm5_ascend.files.yaml_file import read_yaml, yaml_content
from glm5_ascend.quantize.methods.minmax import MINMAX
from glm5_ascend.quantize.methods.registry import METHODS

RECIPE_DIR = "data/quant_recipes"
#: Other names of shipped recipes: GLM-5.3 has GLM-5.2's structure, and people look for its own name.
ALIASES = {"glm-5.3-w4a8": "glm-5.2-w4a8", "glm-5.3-w4a8c8": "glm-5.2-w4a8c8"}


class _RecipePart(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _check_method(name: str) -> str:
    if name not in METHODS:
        raise ValueError(f"no such method; there are {', '.join(METHODS)}")
    return name


MethodName = Annotated[str, AfterValidator(_check_method), WithJsonSchema({"enum": [*METHODS], "type": "string"})]


class QuantizerConfig(_RecipePart):
    """Rounding of one side (activation or weight) of a linear."""

    scope: Literal["per_token", "per_tensor", "per_channel"]
    dtype: Literal["int8", "int4"]
    symmetric: bool
    method: MethodName = MINMAX.name
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

    @model_validator(mode="after")
    def _has_a_type(self) -> QConfig:
        if self.scheme is None:
            raise ValueError(
                "the format has no type for this pair of activation and weight; "
                "it has W8A8_DYNAMIC, W8A8 (static) and W4A8_DYNAMIC"
            )
        return self


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


SelectingStep = FlexAwqSsz | FlexSmoothQuant | Fa3Quant | LinearQuant
SingleStep = Quarot | SelectingStep
Step = Annotated[SingleStep | Group, Field(discriminator="type")]


class Saver(_RecipePart):
    type: Literal["ascendv1_saver"]
    part_file_size: float = Field(default=4, gt=0, le=4)  # GiB


class Metadata(_RecipePart):
    config_id: str
    format_version: Literal[1] = 1
    score: float | None = None
    verified_tags: dict[str, Any] | None = None
    label: dict[str, Any] | None = None


class FallbackRules(_RecipePart):
    """Changes that `analyze` may make by its measurements; `quantize` takes the recipe that it writes.

    extra_bytes: units may get more bits until the output is larger by this share of what the recipe alone makes.
    keys_lost: an INT8 indexer cache (C8) may change this share of the chosen keys, counted once for every layer that
        attends to them; a layer's cache that changes more stays in 16 bits.
    """

    extra_bytes: float = Field(gt=0, le=1)
    keys_lost: float = Field(default=1, gt=0, le=1)


class Spec(_RecipePart):
    process: tuple[Step, ...]
    runner: str | None = None  # msModelSlim's order of work: here layers are always quantized one by one
    fallback: FallbackRules | None = None
    dataset: str = "default"
    save: tuple[Saver, ...] = (Saver(type="ascendv1_saver"),)


class Recipe(_RecipePart):
    """One recipe; `steps` flattens groups."""

    apiversion: Literal["glm5_ascend_v1", "modelslim_v1"]
    metadata: Metadata
    spec: Spec

    @property
    def is_stock(self) -> bool:
        """True for a file of msModelSlim."""
        return self.apiversion == "modelslim_v1"

    @property
    def steps(self) -> list[SingleStep]:
        return [step for item in self.spec.process for step in (item.configs if isinstance(item, Group) else (item,))]

    @property
    def rotates(self) -> bool:
        return any(isinstance(step, Quarot) for step in self.steps)

    @property
    def selections(self) -> list[SelectingStep]:
        """The steps that select modules: all but the rotation."""
        return [step for step in self.steps if not isinstance(step, Quarot)]

    @property
    def cache_steps(self) -> list[Fa3Quant]:
        return [step for step in self.steps if isinstance(step, Fa3Quant)]


def find_recipe(name: str) -> Path:
    """A shipped recipe by name (`w4a8`) or another name of it, or a path to a YAML file."""
    shipped = data_dir(RECIPE_DIR)
    for path in (Path(name), shipped / f"{ALIASES.get(name, name)}.yaml"):
        if os.path.isfile(path):  # also of a name that is too long for one
            return path
    names = sorted([*(p.stem for p in shipped.glob("*.yaml")), *ALIASES])
    raise RecipeError(
        f"recipe {shown(name, 200)}: no such file and no shipped recipe of this name",
        near(name[:200], names, "shipped recipes"),
    )


def load_recipe(path: Path) -> Recipe:
    """Read and check a recipe.

    Raises:
        RecipeError: names file, line and key of the first thing that cannot be honoured.
    """
    return read_yaml(path, Recipe, error=RecipeError, tip="see quant_recipes/README.md for every key", keep=_known_part)


def recipe_content(path: Path) -> dict[str, Any]:
    """The keys and values of a recipe as they stand in the file, of one that `load_recipe` took."""
    content: dict[str, Any] = _known_part(yaml_content(path, error=RecipeError))
    return content


def _known_part(content: Any) -> Any:
    """msModelSlim's files keep the anchors of their qconfigs in further top-level keys."""
    if isinstance(content, dict) and content.get("apiversion") == "modelslim_v1":
        return {key: content[key] for key in ("apiversion", "metadata", "spec") if key in content}
    return content


if __name__ == "__main__":  # `python -m glm5_ascend.quantize.recipe` writes the JSON schema of a recipe again
    write_schemas(data_dir(RECIPE_DIR), {"schema.json": Recipe})
