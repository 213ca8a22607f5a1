"""The load of a deployment: request sizes, clients or rate, the limits on latency, and the acceptance of drafts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from glm5_ascend.errors import PlanError
from glm5_ascend.plan.data_files import key_values, number

#: Acceptance of each of the three drafts of a healthy GLM-5 W4A8 on A3 (log in vllm-ascend #9803).
ACCEPTANCE = (0.891, 0.717, 0.549)
#: Maximum accepted length with three drafts, and maximum number of positions of --acceptance.
MAX_ACCEPTED, MAX_POSITIONS = 4.0, 15
#: Half width of a step's gain on a logarithmic scale, over the public runs with three drafts: 2.91 of GLM-5.2-w4a8 in
#: vllm-ascend's nightly CI (0.86, 0.63, 0.42) to 3.30 after its second model runner (0.90, 0.77, 0.63).
ACCEPTANCE_SPREAD = math.log(3.30 / 2.91) / 2


@dataclass(frozen=True)
class Workload:
    """Requests of one size.

    Attributes:
        prompt, output: tokens of a request.
        concurrency: clients that each send a request after the answer to their last one.
        prefix_hit: share of the prompt found in the prefix cache (and shared by the requests of a rank).
        rate: maximum requests per second; None: no limit.
        requests: requests of a whole run; None: a run without end.
        warm: share of the ranks whose prefix caches are filled before a run starts.
    """

    prompt: int
    output: int
    concurrency: float
    prefix_hit: float = 0.0
    rate: float | None = None
    requests: int | None = None
    warm: float = 0.0

    @property
    def fresh(self) -> float:
        """Prompt tokens to compute, at least one."""
        return max(1.0, self.prompt * (1.0 - self.prefix_hit))

    def __str__(self) -> str:
        hit = f", {100 * self.prefix_hit:.0f} % of the prompt cached" if self.prefix_hit else ""
        run = f", a run of {self.requests:,} requests" if self.requests else ""
        caches = (" with warm caches" if self.warm else " with cold caches") if run and hit else ""
        rate = f", at most {self.rate:g} per second" if self.rate else ""
        return f"{self.prompt:,} tokens in, {self.output:,} out, {self.concurrency:g} at a time{rate}{hit}{run}{caches}"


@dataclass(frozen=True)
class Slo:
    """Limits in seconds; None: no limit."""

    tpot: float | None = None
    ttft: float | None = None

    def excess(self, tpot: float, ttft: float) -> float:
        """Largest ratio of a latency to its limit; 0 without limits, at most 1 if they are met."""
        return max(tpot / self.tpot if self.tpot else 0.0, ttft / self.ttft if self.ttft else 0.0)

    def met(self, tpot: float, ttft: float) -> bool:
        return self.excess(tpot, ttft) <= 1.0


@dataclass(frozen=True)
class Acceptance:
    """Acceptance of drafts by position: share of the steps in which the draft, and so all before it, is accepted."""

    positions: tuple[float, ...] = ACCEPTANCE
    spread: float = ACCEPTANCE_SPREAD

    def tokens_per_step(self, drafts: int) -> float:
        """Mean tokens of a request per step: one, and the drafts before the first rejected one."""
        positions = list(self.positions)
        if len(positions) == 1:
            positions.append(positions[0] * positions[0])
        while len(positions) < drafts:  # every further draft is as good as the last ratio
            positions.append(positions[-1] * positions[-1] / positions[-2] if positions[-2] else 0.0)
        return 1.0 + sum(positions[:drafts])


PUBLIC_ACCEPTANCE = Acceptance()
_MAX_VALUE = 1_048_576


def parse_workload(text: str) -> Workload:
    """`in=3500,out=1500,concurrency=32,prefix_hit=0.9`.

    Raises:
        PlanError: names the key.
    """
    keys = {"in": "prompt", "out": "output", **{name: name for name in list(Workload.__dataclass_fields__)[2:]}}
    values = {"concurrency": 1.0}
    for key, value in key_values("--workload", text, keys).items():
        values[key] = x = number("--workload", key, value)
        if key in ("prefix_hit", "warm"):
            if not 0 <= x <= 1 or (key == "prefix_hit" and x == 1):
                raise PlanError(f"--workload: {key} is {x:g}, must be a share below 1", "90 % is 0.9")
        elif not 0 < x <= _MAX_VALUE or (key in ("in", "out", "requests") and x % 1):
            raise PlanError(f"--workload: {key} is {x:g}, must be above 0, at most {_MAX_VALUE}", "correct it")
    for key in ("in", "out"):
        if key not in values:
            raise PlanError(f"--workload: {key}= is missing", "--workload in=3500,out=1500,concurrency=32")
    whole = ("in", "out", "requests")
    return Workload(**{keys[key]: int(x) if key in whole else x for key, x in values.items()})  # type: ignore[arg-type]


def parse_acceptance(text: str | float | None) -> Acceptance:
    """`2.9`, the mean accepted length with three drafts, or by position `0.90,0.77,0.63`.

    Raises:
        PlanError: not a number, out of range, or a later draft accepted more often than one before it.
    """
    if text is None:
        return PUBLIC_ACCEPTANCE
    values = [number("--acceptance", "X", part) for part in str(text).split(",")]
    if len(values) == 1:
        if not 1 <= values[0] <= MAX_ACCEPTED:
            raise PlanError(f"--acceptance {values[0]:g}: must be 1 to {MAX_ACCEPTED:g}", "correct --acceptance")
        return Acceptance(tuple(p * (values[0] - 1) / sum(ACCEPTANCE) for p in ACCEPTANCE), 0.0)
    if values != sorted(values, reverse=True) or len(values) > MAX_POSITIONS or not 0 <= values[-1] <= values[0] <= 1:
        raise PlanError(
            "--acceptance: shares of all steps, from the first draft to the last, as vLLM logs", "0.90,0.77,0.63"
        )
    return Acceptance(tuple(values), 0.0)


def parse_slo(text: str | None) -> Slo:
    """`tpot=50ms,ttft=2s`."""
    limits: dict[str, float] = {}
    for key, value in key_values("--slo", text, ("tpot", "ttft")).items() if text else ():
        if not value.endswith("s"):
            raise PlanError(f"--slo: {key}={value!r:.20} has no unit", "write 50ms or 2s")
        scale = 1e-3 if value.endswith("ms") else 1.0
        limits[key] = scale * number("--slo", key, value.removesuffix("s").removesuffix("m"))
        if limits[key] <= 0:
            raise PlanError(f"--slo: {key} must be above 0", "write 50ms or 2s")
    return Slo(**limits)
