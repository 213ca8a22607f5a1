"""YAML files of the planner: base classes of their schemas, and their paths."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from glm5_ascend.errors import PlanError
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


def key_values(option: str, text: str, keys: Collection[str]) -> dict[str, str]:
    """Read `key=value,...`.

    Raises:
        PlanError: an unknown key.
    """
    pairs = [[part.strip() for part in item.partition("=")] for item in text.split(",")]
    for key, _, _ in pairs:
        if key not in keys:
            raise PlanError(f"{option}: unknown key {key!r:.40}", f"known: {', '.join(keys)}")
    return {key: value for key, _, value in pairs}


def number(option: str, key: str, text: str) -> float:
    """Read a finite number.

    Raises:
        PlanError: names the option and the key.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise PlanError(f"{option}: {key}={text.strip()!r:.40} is not a number", "write it as in concurrency=32")
    return value
