"""What comes in: YAML files, KEY=N options, and the load with its limits on latency."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from glm5_ascend.errors import PlanError, shown
from glm5_ascend.files.resources import data_dir

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1, le=1_048_576)]
Cache = Literal["none", "li", "li+sfa"]
T = TypeVar("T")
#: The type of an option's value, for pydantic; made once.
adapter = functools.cache(TypeAdapter)
#: Acceptance of each of the three drafts of a healthy GLM-5 W4A8 on A3 (log in vllm-ascend #9803).
ACCEPTANCE = (0.891, 0.717, 0.549)
#: Half width of a step's gain on a logarithmic scale, over the public runs with three drafts: 2.91 of GLM-5.2-w4a8 in
#: vllm-ascend's nightly CI (0.86, 0.63, 0.42) to 3.30 after its second model runner (0.90, 0.77, 0.63).
ACCEPTANCE_SPREAD = math.log(3.30 / 2.91) / 2
_Limited = Annotated[float, Field(ge=1e-6, le=1_048_576)]


class Keys(BaseModel):
    """Keys of a YAML mapping; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def data_file(name: str) -> Path:
    return data_dir("plan/data") / name


def pairs(option: str, text: str) -> dict[str, str]:
    """The keys and values of `key=value,...`; PlanError: a key without a value, or twice."""
    values: dict[str, str] = {}
    for item in text.split(","):
        key, value = map(str.strip, item.partition("=")[::2])
        if not key or not value or key in values:
            problem = f"{shown(key)} is given twice" if key in values else f"{shown(item)} is not KEY=VALUE"
            raise PlanError(f"{option}: {problem}", f"`glm5-ascend plan --help` has the keys of {option}")
        values[key] = value
    return values


def read_option(option: str, to: type[T], values: Mapping[str, Any]) -> T:
    """A value of the type `to` from keys and texts; raises PlanError, which names the option and the key."""
    try:
        return adapter(to).validate_python(values)  # type: ignore[arg-type, no-any-return]
    except ValidationError as error:
        first = error.errors()[0]
        key = "_".join(map(str, first["loc"])).removeprefix("decode_")
        problem = f"{key}={str(first['input'])!r:.40}: {first['msg'].removeprefix('Value error, ')}"
        if first["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
            problem = f"unknown key {key!r:.40}"
        elif first["type"] == "missing":
            problem = f"{key}= is missing"
        raise PlanError(f"{option}: {problem}", f"`glm5-ascend plan --help` has the keys of {option}") from None


@dataclass(frozen=True)
class Workload:
    """Requests of one size in tokens, by clients that each send one after the answer to their last one.

    Attributes:
        prefix_hit: share of the prompt that is a known prefix. prefixes: their number; None: one for each client.
        hits: where they are found: device (only as many as fit the caches) | host | pool.
        rate: maximum requests per second. requests: those of a whole run; None: a run without end.
        warm: share of the ranks whose prefix caches are filled before a run starts.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")
    prompt: Annotated[Count, Field(alias="in")]
    output: Annotated[Count, Field(alias="out")]
    concurrency: _Limited = 1.0
    prefix_hit: Annotated[float, Field(ge=0, lt=1)] = 0.0
    prefixes: Count | None = None
    hits: Literal["device", "host", "pool"] = "device"
    rate: _Limited | None = None
    requests: Count | None = None
    warm: Share = 0.0

    @property
    def fresh(self) -> float:
        """Prompt tokens to compute, at least one."""
        return max(1.0, self.prompt * (1.0 - self.prefix_hit))

    @property
    def different(self) -> int:
        """Number of different prefixes."""
        return self.prefixes or math.ceil(self.concurrency)

    def __str__(self) -> str:
        whose = f"{self.different} prefixes" if self.prefixes else "one prefix for each client"
        whose = "one prefix for all" if self.different == 1 else whose
        percent = f"{100 * self.prefix_hit:.0f} %"
        hit = f", {percent} of the prompt known ({whose}, in the caches of the {self.hits})" if self.prefix_hit else ""
        run = f", a run of {self.requests:,} requests" if self.requests else ""
        caches = (" with warm caches" if self.warm else " with cold caches") if run and hit else ""
        rate = f", at most {self.rate:g} per second" if self.rate else ""
        return f"{self.prompt:,} tokens in, {self.output:,} out, {self.concurrency:g} at a time{rate}{hit}{run}{caches}"


def _seconds(text: str) -> float:
    if not text.endswith("s"):
        raise ValueError("no unit: write 50ms or 2s")
    return float(text.removesuffix("s").removesuffix("m")) * (1e-3 if text.endswith("ms") else 1.0)


_Limit = Annotated[float, BeforeValidator(_seconds), Field(ge=1e-6, allow_inf_nan=False)] | None


@dataclass(frozen=True)
class Slo:
    """Limits in seconds; None: no limit."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    tpot: _Limit = None
    ttft: _Limit = None

    def excess(self, tpot: float, ttft: float) -> float:
        """Largest ratio of a latency to its limit; 0 without limits, at most 1 if they are met."""
        return max(tpot / self.tpot if self.tpot else 0.0, ttft / self.ttft if self.ttft else 0.0)


def parse_workload(text: str) -> Workload:
    """`in=3500,out=1500,concurrency=32,prefix_hit=0.9`; raises PlanError, which names the key."""
    return read_option("--workload", Workload, pairs("--workload", text))


def tokens_per_step(drafts: int, accepted: float | None) -> float:
    """Mean tokens of a request per step; `accepted`: the mean with three drafts, None: that of a healthy GLM-5."""
    scale = 1.0 if accepted is None else (accepted - 1.0) / sum(ACCEPTANCE)
    ratio = ACCEPTANCE[-1] / ACCEPTANCE[-2]  # of further drafts
    further = (ACCEPTANCE[-1] * ratio**n for n in range(1, drafts - len(ACCEPTANCE) + 1))
    return 1.0 + scale * (sum(ACCEPTANCE[:drafts]) + sum(further))
