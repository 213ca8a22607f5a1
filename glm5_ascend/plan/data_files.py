"""YAML files of the planner: base classes of their schemas, and their paths."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from glm5_ascend.files.resources import data_dir

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Cache = Literal["none", "li", "li+sfa"]
Quality = Literal["vendor", "paper", "secondary", "derived", "measured", "guess"]


class Keys(BaseModel):
    """Keys of a YAML mapping; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def data_file(name: str) -> Path:
    """A file of plan/data."""
    return data_dir("plan/data") / name
