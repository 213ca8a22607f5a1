"""What is asked of a deployment: request sizes, how many at a time or per second, and the limits on latency."""

from __future__ import annotations

import math
from dataclasses import dataclass

from glm5_ascend.errors import PlanError

#: Mean accepted tokens per position of the three drafts of a healthy GLM-5 W4A8 on A3 (log in vllm-ascend #9803).
ACCEPTANCE = (0.891, 0.717, 0.549)

#: The same elsewhere: GLM-5.2-w4a8 in vllm-ascend's nightly CI, before and after its second model runner.
OTHER_ACCEPTANCES = ((0.86, 0.63, 0.42), (0.90, 0.77, 0.63))


@dataclass(frozen=True)
class Workload:
    """Requests of one kind.

    Attributes:
        prompt, output: tokens of a request.
        concurrency: clients that each wait for their answer before they ask again.
        prefix_hit: share of the prompt found in the prefix cache (and shared by the requests of a rank).
        rate: most requests per second that are sent, None: no limit.
        requests: requests of a whole run, None: one that goes on. A short run fills up and empties, and prints less.
        warm: a run's prefix caches are filled before it starts.
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
        """Prompt tokens that must be computed; at least one always is."""
        return max(1.0, self.prompt * (1.0 - self.prefix_hit))


@dataclass(frozen=True)
class Slo:
    """Limits in seconds; None: none."""

    tpot: float | None = None
    ttft: float | None = None

    def met(self, tpot: float, ttft: float) -> bool:
        return (self.tpot is None or tpot <= self.tpot) and (self.ttft is None or ttft <= self.ttft)


def accepted(drafts: int, acceptance: float | None = None) -> float:
    """Tokens a request gains per step: one, and the drafts before the first refused one.

    Args:
        acceptance: mean accepted length measured with three drafts, None: ACCEPTANCE.
    """
    positions = list(ACCEPTANCE)
    if acceptance is not None:
        positions = [p * (acceptance - 1) / sum(ACCEPTANCE) for p in ACCEPTANCE]
    while len(positions) < drafts:  # every further draft is as good as the last ratio
        positions.append(positions[-1] * positions[-1] / positions[-2] if positions[-2] else 0.0)
    return 1.0 + sum(positions[:drafts])


def acceptance_spread() -> float:
    """Half width, on a logarithmic scale, of what public runs gain per step with three drafts."""
    gains = [1.0 + sum(positions) for positions in (ACCEPTANCE, *OTHER_ACCEPTANCES)]
    return math.log(max(gains) / min(gains)) / 2


_KEYS = {"in": "prompt", "out": "output", "concurrency": "concurrency", "prefix_hit": "prefix_hit", "rate": "rate",
         "requests": "requests"}  # fmt: skip
_LARGEST = 1_000_000


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
        if (key in values and values[key] <= 0) or (
            key in ("in", "out", "requests") and key in values and values[key] != int(values[key])
        ):
            raise PlanError(f"--workload: {key} is {values[key]:g}, must be a number above 0", "correct it")
        if values.get(key, 0) > _LARGEST:
            raise PlanError(f"--workload: {key} is {values[key]:g}, at most {_LARGEST} are planned for", "correct it")
    hit = values.get("prefix_hit", 0.0)
    if not 0 <= hit < 1:
        raise PlanError(f"--workload: prefix_hit is {hit:g}, a share from 0 to below 1 is meant", "90 % is 0.9")
    requests = int(values["requests"]) if "requests" in values else None
    clients = values.get("concurrency", 1.0)
    return Workload(int(values["in"]), int(values["out"]), clients, hit, values.get("rate"), requests)


def parse_slo(text: str | None) -> Slo:
    """`tpot=50ms,ttft=2s`."""
    found: dict[str, float] = {}
    for item in (text or "").split(","):
        if not item:
            continue
        key, _, value = item.partition("=")
        key, value = key.strip(), value.strip()
        if key not in ("tpot", "ttft"):
            raise PlanError(f"--slo: unknown key {key!r}", "known: tpot, ttft, as in tpot=50ms,ttft=2s")
        for unit, seconds in (("ms", 1e-3), ("s", 1.0)):
            if value.endswith(unit):
                found[key] = seconds * _number("--slo", key, value.removesuffix(unit))
                break
        else:
            raise PlanError(f"--slo: {key}={value!r} has no unit", "write 50ms or 2s")
        if found[key] <= 0:
            raise PlanError(f"--slo: {key} must be above 0", "write 50ms or 2s")
    return Slo(found.get("tpot"), found.get("ttft"))


def _number(option: str, key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise PlanError(f"{option}: {key}={text.strip()!r} is not a number", "write it as in concurrency=32")
    return value
