"""YAML files and KEY=N options of the planner: base class and types of their values, and the reader of options."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from glm5_ascend.errors import PlanError
from glm5_ascend.files.resources import data_dir

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1, le=1_048_576)]
Cache = Literal["none", "li", "li+sfa"]
T = TypeVar("T")
#: The type of an option's value, for pydantic; made once.
adapter = functools.cache(TypeAdapter)


class Keys(BaseModel):
    """Keys of a YAML mapping; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def data_file(name: str) -> Path:
    """A file of plan/data."""
    return data_dir("plan/data") / name


def pairs(text: str) -> dict[str, str]:
    """The keys and values of `key=value,...`."""
    items = (item.partition("=") for item in text.split(","))
    return {key.strip(): value.strip() for key, _, value in items}


def read_option(option: str, kind: type[T], values: Mapping[str, Any], tip: str = "") -> T:
    """A value of `kind` from keys and texts; raises PlanError, which names the option and the key."""
    try:
        return adapter(kind).validate_python(values)  # type: ignore[arg-type, no-any-return]
    except ValidationError as error:
        first = error.errors()[0]
        key = "_".join(map(str, first["loc"])).removeprefix("decode_")
        problem = f"{key}={str(first['input'])!r:.40}: {first['msg'].removeprefix('Value error, ')}"
        if first["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
            problem = f"unknown key {key!r:.40}"
        elif first["type"] == "missing":
            problem = f"{key}= is missing"
        tip = tip or f"`glm5-ascend plan --help` has the keys of {option}"
        raise PlanError(f"{option}: {problem}", tip) from None
