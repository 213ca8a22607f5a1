"""Reports of rehearsed ranks, read from JSON, and their problems."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict

from glm5_ascend.errors import EXIT_CHECK_FAILED, EXIT_OK, shortened

#: Differences from the planner's numbers below this are not reported, in per cent.
TOLERANCE = 0.1
_MEANING = {
    "uninitialised": "never written by the loader",
    "twice": "written twice",
    "wrong shape": "of a wrong shape",
    "wrong type": "cast between integers and floats",
}


class _Report(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class LineReport(_Report):
    """The first lines of a list, and how many it has."""

    count: int
    first: list[str]


class FailureReport(_Report):
    """The stage that failed, and the tensor of the checkpoint that was loaded."""

    stage: str
    error: str
    tensor: str = ""
    trace: str = ""


class ModelReport(_Report):
    """Target or draft. built_bytes: before loading; parameter_bytes, resident_bytes: after post-processing."""

    parameters: int
    built_bytes: int
    schemes: dict[str, int]
    problems: dict[str, LineReport] = {}
    left_at_default: LineReport | None = None
    parameter_bytes: int | None = None
    resident_bytes: int | None = None


class CacheReport(_Report):
    """Caches of a rank.

    request_bytes: what a request holds whatever its length.
    blocks: number that vLLM allocates from `available_bytes`; refused: its message if that is too little.
    ignored: requested int8 caches that no layer has.
    """

    layers: int
    bytes_per_token: float
    request_bytes: int = 0
    tokens_per_block: int
    available_bytes: int | None = None
    blocks: int | None = None
    refused: str = ""
    ignored: list[str] = []


class WalkReport(_Report):
    """Operators of a step. operators: distinct lines with shapes; order: index of each call; ours: our stand-ins."""

    operators: list[str]
    order: list[int]
    ours: list[str]


class RankReport(_Report):
    """The report of `inside/rank.py`."""

    versions: dict[str, str] = {}
    seconds: dict[str, float]
    models: dict[str, ModelReport]
    failure: FailureReport | None
    unused: LineReport | None = None
    parameter_bytes: int | None = None
    resident_bytes: int | None = None
    cache: CacheReport | None = None
    walk: dict[str, WalkReport] = {}
    peak_bytes: int


@dataclass(frozen=True)
class PlannedRank:
    """The planner's numbers for a rank's die, in bytes. usable_bytes: for weights and caches together."""

    parameter_bytes: int
    bytes_per_token: float
    usable_bytes: int
    request_bytes: float = 0


@dataclass(frozen=True)
class RehearsedRank:
    """One rank of one role. layout: a problem of the role's parallel sizes."""

    role: str
    rank: int
    world: int
    report: RankReport
    planned: PlannedRank | None = None
    layout: str = ""

    @property
    def problems(self) -> list[str]:
        """Problems that keep the rank from serving correctly, one line each."""
        return list(self._problems())

    def _problems(self) -> Iterator[str]:
        if self.layout:
            yield self.layout
        for name, model in self.report.models.items():
            for problem, lines in model.problems.items():
                yield f"{name}: {lines.count} {_MEANING.get(problem, problem)}: {shortened(lines.first[0], 200)}"
        if failure := self.report.failure:
            at = f" at {failure.tensor}" if failure.tensor else ""
            yield f"{failure.stage}{at}: {shortened(failure.error, 600)}"
        if self.report.unused is not None and self.report.unused.count:
            unused = self.report.unused
            yield f"{unused.count} tensors of the checkpoint are unused: {unused.first[0]}"
        if self.report.cache is not None and self.report.cache.refused:
            yield f"cache: {shortened(self.report.cache.refused, 300)}"
        for part in () if self.report.cache is None else self.report.cache.ignored:
            yield f"cache: int8 {part} are requested, but no layer has them: this version reads other switches or marks"

    @property
    def differences(self) -> dict[str, float]:
        """vllm-ascend's numbers relative to the planner's, in per cent, if both are known."""
        if self.planned is None:
            return {}
        pairs = {"parameters": (self.report.parameter_bytes, self.planned.parameter_bytes)}
        if self.report.cache is not None:
            pairs["cache"] = (self.report.cache.bytes_per_token, self.planned.bytes_per_token)  # type: ignore[assignment]
            pairs["state"] = (self.report.cache.request_bytes, self.planned.request_bytes)  # type: ignore[assignment]
        return {name: 100 * (real / planned - 1) for name, (real, planned) in pairs.items() if real and planned}

    @property
    def cached_tokens(self) -> int | None:
        """Tokens in the caches of the rank's group, from vLLM's number of blocks."""
        cache = self.report.cache
        return None if cache is None or cache.blocks is None else cache.blocks * cache.tokens_per_block


@dataclass(frozen=True)
class Rehearsal:
    """All rehearsed ranks."""

    profile: str
    checkpoint: str
    ranks: tuple[RehearsedRank, ...]

    @property
    def exit_code(self) -> int:
        return EXIT_CHECK_FAILED if any(rank.problems for rank in self.ranks) else EXIT_OK

    @property
    def versions(self) -> dict[str, str]:
        return next((rank.report.versions for rank in self.ranks if rank.report.versions), {})

    @property
    def verdict(self) -> str:
        """One line."""
        bad = [rank for rank in self.ranks if rank.problems]
        by = f"vllm-ascend {self.versions.get('vllm-ascend', '?')}"
        count = f"{len(self.ranks)} rank" + ("" if len(self.ranks) == 1 else "s")
        if bad:
            return f"{len(bad)} of {count} of {self.profile} cannot serve this with {by}"
        return f"ok: {count} of {self.profile} built, loaded and stepped by {by}; nothing was computed"

    def to_dict(self) -> dict[str, Any]:
        """The data of `--json`."""
        return {
            "schema_version": 1, "command": "rehearse", "ok": self.exit_code == EXIT_OK, "exit_code": self.exit_code,
            "verdict": self.verdict, "profile": self.profile, "checkpoint": self.checkpoint, "versions": self.versions,
            "ranks": [
                {
                    "role": rank.role, "rank": rank.rank, "world": rank.world, "problems": rank.problems,
                    "planned": asdict(rank.planned) if rank.planned else None, "differences": rank.differences,
                    "cached_tokens": rank.cached_tokens, "report": rank.report.model_dump(),
                }
                for rank in self.ranks
            ],
        }  # fmt: skip
