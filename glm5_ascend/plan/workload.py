"""The load of a deployment: request sizes, clients or rate, and the limits on latency."""

from __future__ import annotations

import math
from dataclasses import dataclass

from glm5_ascend.errors import PlanError

#: Acceptance of each of the three drafts of a healthy GLM-5 W4A8 on A3 (log in vllm-ascend #9803).
ACCEPTANCE = (0.891, 0.717, 0.549)

#: Maximum accepted length with three drafts, and maximum number of positions of --acceptance.
MAX_ACCEPTED, MAX_POSITIONS = 4.0, 15

#: Acceptance of other runs: GLM-5.2-w4a8 in vllm-ascend's nightly CI, before and after its second model runner.
OTHER_ACCEPTANCES = ((0.86, 0.63, 0.42), (0.90, 0.77, 0.63))


@dataclass(frozen=True)
class Workload:
    """Requests of one size.

    Attributes:
        prompt, output: tokens of a request.
        concurrency: clients that each send a request after the answer to their last one.
        prefix_hit: share of the prompt found in the prefix cache (and shared by the requests of a rank).
        rate: maximum requests per second; None: no limit.
        requests: requests of a whole run; None: a run without end. A short run fills up and drains: lower throughput.
        warm: the prefix caches of a run are filled before it starts.
    """

    prompt: int
    output: int
    concurrency: float
    prefix_hit: float = 0.0
    rate: float | None = None
    requests: int | None = None
    warm: bool = False

    @property
    def fresh(self) -> float:
        """Prompt tokens to compute, at least one."""
        return max(1.0, self.prompt * (1.0 - self.prefix_hit))


@dataclass(frozen=True)
class Slo:
    """Limits in seconds; None: no limit."""

    tpot: float | None = None
    ttft: float | None = None

    def met(self, tpot: float, ttft: float) -> bool:
        return (self.tpot is None or tpot <= self.tpot) and (self.ttft is None or ttft <= self.ttft)


@dataclass(frozen=True)
class Acceptance:
    """Measured acceptance of drafts by position.

    Attributes:
        positions: share of the steps in which the draft of this position, and so all before it, is accepted.
        spread: half width of a step's gain on a logarithmic scale.
    """

    positions: tuple[float, ...]
    spread: float = 0.0


def accepted(drafts: int, acceptance: float | Acceptance | None = None) -> float:
    """Mean tokens of a request per step: one, and the drafts before the first rejected one.

    Args:
        acceptance: mean accepted length measured with three drafts, or by position; None: ACCEPTANCE.
    """
    positions = list(ACCEPTANCE)
    if isinstance(acceptance, Acceptance):
        positions = list(acceptance.positions)
        if len(positions) == 1:
            positions.append(positions[0] * positions[0])
    elif acceptance is not None:
        positions = [p * (acceptance - 1) / sum(ACCEPTANCE) for p in ACCEPTANCE]
    while len(positions) < drafts:  # every further draft is as good as the last ratio
        positions.append(positions[-1] * positions[-1] / positions[-2] if positions[-2] else 0.0)
    return 1.0 + sum(positions[:drafts])


def acceptance_spread(acceptance: float | Acceptance | None = None) -> float:
    """Half width of a step's gain on a logarithmic scale; None: of the public runs with three drafts."""
    if acceptance is not None:
        return acceptance.spread if isinstance(acceptance, Acceptance) else 0.0
    gains = [1.0 + sum(positions) for positions in (ACCEPTANCE, *OTHER_ACCEPTANCES)]
    return math.log(max(gains) / min(gains)) / 2


_KEYS = {"in": "prompt", "out": "output", "concurrency": "concurrency", "prefix_hit": "prefix_hit", "rate": "rate",
         "requests": "requests"}  # fmt: skip
_MAX_VALUE = 1_000_000


def parse_workload(text: str) -> Workload:
    """`in=3500,out=1500,concurrency=32,prefix_hit=0.9`.

    Raises:
        PlanError: names the key.
    """
    values: dict[str, float] = {}
    for item in text.split(","):
        key, _, value = item.partition("=")
        if key.strip() not in _KEYS:
            raise PlanError(f"--workload: unknown key {key.strip()!r}", f"known: {', '.join(_KEYS)}")
        values[key.strip()] = _number("--workload", key.strip(), value)
    for key in ("in", "out"):
        if key not in values:
            raise PlanError(f"--workload: {key}= is missing", "--workload in=3500,out=1500,concurrency=32")
    for key in ("in", "out", "concurrency", "rate", "requests"):
        fraction = key in ("in", "out", "requests") and values.get(key, 0) % 1
        if key in values and (values[key] <= 0 or fraction):
            raise PlanError(f"--workload: {key} is {values[key]:g}, must be a number above 0", "correct it")
        if values.get(key, 0) > _MAX_VALUE:
            raise PlanError(f"--workload: {key} is {values[key]:g}, the maximum is {_MAX_VALUE}", "correct it")
    hit = values.get("prefix_hit", 0.0)
    if not 0 <= hit < 1:
        raise PlanError(f"--workload: prefix_hit is {hit:g}, must be a share from 0 to below 1", "90 % is 0.9")
    requests = int(values["requests"]) if "requests" in values else None
    clients = values.get("concurrency", 1.0)
    return Workload(int(values["in"]), int(values["out"]), clients, hit, values.get("rate"), requests)


def parse_acceptance(text: str | float | None) -> float | Acceptance | None:
    """`2.9`, `0.90,0.77,0.63`, or with ranges `0.86-0.90,0.63-0.77,0.42-0.63`.

    Raises:
        PlanError: not a number, out of range, or a later draft accepted more often than one before it.
    """
    if text is None or not isinstance(text, str):
        return _mean_length(text)
    if "," not in text:
        return _mean_length(_number("--acceptance", "X", text))
    low, high = list[float](), list[float]()
    for position, item in enumerate(text.split(","), start=1):
        ends = [_number("--acceptance", f"draft {position}", part) for part in item.split("-")]
        if len(ends) > 2 or not all(0 <= end <= 1 for end in ends) or ends != sorted(ends):
            raise PlanError(f"--acceptance: draft {position} is {item.strip()!r:.40}, not a share", "0.77 or 0.63-0.77")
        low.append(ends[0])
        high.append(ends[-1])
    if low != sorted(low, reverse=True) or high != sorted(high, reverse=True) or len(low) > MAX_POSITIONS:
        raise PlanError(
            "--acceptance: a later draft is accepted more often than one before it", "shares of all steps, as vLLM logs"
        )
    middle = tuple((a + b) / 2 for a, b in zip(low, high, strict=True))
    return Acceptance(middle, math.log((1 + sum(high)) / (1 + sum(low))) / 2)


def _mean_length(value: float | None) -> float | None:
    if value is not None and not 1 <= value <= MAX_ACCEPTED:
        raise PlanError(f"--acceptance {value:g}: must be 1 to {MAX_ACCEPTED:g}", "correct --acceptance")
    return value


def parse_slo(text: str | None) -> Slo:
    """`tpot=50ms,ttft=2s`."""
    limits: dict[str, float] = {}
    for item in (text or "").split(","):
        if not item:
            continue
        key, _, value = item.partition("=")
        key, value = key.strip(), value.strip()
        if key not in ("tpot", "ttft"):
            raise PlanError(f"--slo: unknown key {key!r}", "known: tpot, ttft, as in tpot=50ms,ttft=2s")
        for unit, seconds in (("ms", 1e-3), ("s", 1.0)):
            if value.endswith(unit):
                limits[key] = seconds * _number("--slo", key, value.removesuffix(unit))
                break
        else:
            raise PlanError(f"--slo: {key}={value!r} has no unit", "write 50ms or 2s")
        if limits[key] <= 0:
            raise PlanError(f"--slo: {key} must be above 0", "write 50ms or 2s")
    return Slo(limits.get("tpot"), limits.get("ttft"))


def _number(option: str, key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise PlanError(f"{option}: {key}={text.strip()!r} is not a number", "write it as in concurrency=32")
    return value
