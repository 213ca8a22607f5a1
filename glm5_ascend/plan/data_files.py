"""Schemas of the planner's YAML files, and their paths.

Machines are in hardware.py, public results in baselines.py. `python -m glm5_ascend.plan.schemas` writes their schemas.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated, Literal, NotRequired, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator, with_config
from typing_extensions import TypedDict

from glm5_ascend.files.resources import data_dir

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Quality = Literal["vendor", "paper", "secondary", "derived", "measured", "guess"]
Cache = Literal["none", "li", "li+sfa"]
#: Keys of config.json; `parse_config` checks them.
ConfigValues = dict[str, bool | int | float | str]
LinearType = Literal["FLOAT", "W8A8", "W8A8_DYNAMIC", "W4A8_DYNAMIC"]


class Keys(BaseModel):
    """Keys of a YAML mapping; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@with_config(ConfigDict(extra="forbid"))
class EfficiencyKeys(TypedDict):
    """The constants of `Efficiencies`; `prefill` is 1 by default."""

    stream: Positive
    gather: Positive
    compute: Positive
    graph_seconds: NotNegative
    eager_seconds: NotNegative
    token_seconds: NotNegative
    prefill: NotRequired[Positive]


class FittedFile(Keys):
    """data/fitted.yaml, as benchmarks/report_planner.py writes it.

    Attributes:
        bands: half width of a prediction's logarithm, by output (tok_s, ttft, tpot), in units of the expected error.
        slope: relative growth of the expected error with the distance from the nearest public row.
        median_error: median error of the judged rows, by output.
        unseen: predicted / measured, by row and output, by a fit that saw neither the row nor another of its group.
    """

    date: datetime.date
    fitted_on: tuple[str, ...]
    efficiencies: EfficiencyKeys
    bands: dict[str, Positive]
    slope: NotNegative
    median_error: dict[str, Positive]
    unseen: dict[str, dict[str, Positive]]


class QuantizationKeys(Keys):
    """Types of the routed experts, of the attention's linears, of dense and shared MLPs; caches at run time.

    Attributes:
        fp8: needs units for FP8; the types above only say how many bytes a weight takes.
        little_data: a sentence about missing data.
    """

    experts: LinearType
    attention: LinearType
    mlp: LinearType
    cache: Cache
    fp8: bool = False
    little_data: str | None = None


class FamilyFile(Keys):
    """data/models.yaml; the keys of a model override the common ones."""

    common: ConfigValues
    models: dict[str, ConfigValues]
    quantizations: dict[str, QuantizationKeys]


class GuessedFigure(Keys):
    """An unpublished number with its range."""

    value: NotNegative
    low: NotNegative
    high: NotNegative
    quality: Quality
    source: str

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.low <= self.value <= self.high:
            raise ValueError(f"{self.value:g} is not between low {self.low:g} and high {self.high:g}")
        return self


class MemoryFile(Keys):
    """data/memory.yaml: memory of a die without weights and caches; bytes, and a number of communicators."""

    graphs_bytes: GuessedFigure
    margin_bytes: GuessedFigure
    communicators: GuessedFigure
    prefill_decode_bytes: GuessedFigure


def data_file(name: str) -> Path:
    """A file of plan/data."""
    return data_dir("plan/data") / name
