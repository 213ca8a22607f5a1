"""Reports of rehearsed ranks, read from JSON, and the verdict on them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict

from glm5_ascend.errors import EXIT_CHECK_FAILED, EXIT_OK

#: Differences from the planner's numbers below this are not reported, in per cent.
TOLERANCE = 0.1


class CacheReport(BaseModel):
    """Caches of a rank.

    request_bytes: what a request holds whatever its length. blocks: number that vLLM allocates, None: not asked.
    """

    model_config = ConfigDict(frozen=True)

    bytes_per_token: float
    request_bytes: int
    tokens_per_block: int
    blocks: int | None = None


class RankReport(BaseModel):
    """The report of `inside/rank.py`.

    models: name -> class. problems: what keeps the rank from serving correctly, one line each.
    """

    model_config = ConfigDict(frozen=True)

    problems: list[str]
    versions: dict[str, str] = {}
    models: dict[str, str] = {}
    schemes: dict[str, int] = {}
    parameter_bytes: int | None = None
    resident_bytes: int | None = None
    cache: CacheReport | None = None


@dataclass(frozen=True)
class PlannedRank:
    """The planner's numbers for a rank's die, in bytes. usable_bytes: for weights and caches together."""

    parameter_bytes: int
    bytes_per_token: float
    usable_bytes: int
    request_bytes: float = 0


@dataclass(frozen=True)
class RehearsedRank:
    """One rank of one role, and its report."""

    role: str
    rank: int
    world: int
    report: RankReport
    planned: PlannedRank | None = None

    @property
    def differences(self) -> dict[str, float]:
        """vllm-ascend's numbers relative to the planner's, in per cent, if both are known."""
        if self.planned is None:
            return {}
        pairs: dict[str, tuple[float | None, float]] = {
            "parameters": (self.report.parameter_bytes, self.planned.parameter_bytes)
        }
        if self.report.cache is not None:
            pairs["cache"] = (self.report.cache.bytes_per_token, self.planned.bytes_per_token)
            pairs["state"] = (self.report.cache.request_bytes, self.planned.request_bytes)
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
        return EXIT_CHECK_FAILED if any(rank.report.problems for rank in self.ranks) else EXIT_OK

    @property
    def versions(self) -> dict[str, str]:
        return next((rank.report.versions for rank in self.ranks if rank.report.versions), {})

    @property
    def verdict(self) -> str:
        """One line."""
        bad = [rank for rank in self.ranks if rank.report.problems]
        by = f"vllm-ascend {self.versions.get('vllm-ascend', '?')}"
        count = f"{len(self.ranks)} rank" + ("" if len(self.ranks) == 1 else "s")
        if bad:
            return f"{len(bad)} of {count} of {self.profile} cannot serve this with {by}"
        return f"ok: {count} of {self.profile} built and loaded by {by}; nothing was computed"

    def to_dict(self) -> dict[str, Any]:
        """The data of `--json`."""
        return {
            "schema_version": 1, "command": "rehearse", "ok": self.exit_code == EXIT_OK, "exit_code": self.exit_code,
            "verdict": self.verdict, "profile": self.profile, "checkpoint": self.checkpoint, "versions": self.versions,
            "ranks": [
                {
                    "role": rank.role, "rank": rank.rank, "world": rank.world, "differences": rank.differences,
                    "planned": asdict(rank.planned) if rank.planned else None, "cached_tokens": rank.cached_tokens,
                    **rank.report.model_dump(exclude={"versions"}),
                }
                for rank in self.ranks
            ],
        }  # fmt: skip
