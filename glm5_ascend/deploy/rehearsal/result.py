"""Reports of rehearsed ranks, read from JSON, and the verdict on them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, computed_field

from glm5_ascend.errors import EXIT_CHECK_FAILED, EXIT_OK, json_frame


class CacheReport(BaseModel):
    """Caches of a rank.

    request_bytes: what a request holds whatever its length. blocks: number that vLLM allocates, None: not asked.
    """

    bytes_per_token: float
    request_bytes: int
    tokens_per_block: int
    blocks: int | None = None


@dataclass(frozen=True)
class PlannedRank:
    """The planner's numbers for a rank's die, in bytes. usable_bytes: for weights and caches together."""

    parameter_bytes: int
    bytes_per_token: float
    usable_bytes: int
    request_bytes: float = 0


class RehearsedRank(BaseModel):
    """One rank of one role, and the report of `inside/rank.py` on it.

    models: name -> class. problems: what keeps the rank from serving correctly, one line each.
    """

    role: str
    rank: int
    world: int
    planned: PlannedRank | None = None
    problems: list[str]
    versions: dict[str, str] = {}
    models: dict[str, str] = {}
    parameter_bytes: int | None = None
    resident_bytes: int | None = None
    cache: CacheReport | None = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def differences(self) -> dict[str, float]:
        """vllm-ascend's numbers relative to the planner's, in per cent, where both are known."""
        planned = self.planned
        if planned is None:
            return {}
        pairs: dict[str, tuple[float, float]] = {"parameters": (self.parameter_bytes or 0, planned.parameter_bytes)}
        if self.cache is not None:
            pairs["cache"] = self.cache.bytes_per_token, planned.bytes_per_token
            pairs["state"] = self.cache.request_bytes, planned.request_bytes
        return {name: 100 * (real / expected - 1) for name, (real, expected) in pairs.items() if real and expected}

    @computed_field  # type: ignore[prop-decorator]
    @property
    def cached_tokens(self) -> int | None:
        """Tokens in the caches of the rank's group, from vLLM's number of blocks."""
        cache = self.cache
        return None if cache is None or cache.blocks is None else cache.blocks * cache.tokens_per_block

    @property
    def line(self) -> str:
        """The rank in one line; what its rehearsal did not reach is left out."""
        sizes = {"parameters": self.parameter_bytes, "alive": self.resident_bytes}
        figures = [f"{name} {count / 1e9:.3f} GB" for name, count in sizes.items() if count]
        figures += [f"cache {self.cache.bytes_per_token:,.0f} B/token"] if self.cache else []
        figures += [f"{self.cached_tokens:,} tokens"] if self.cached_tokens else []
        if self.differences:
            off = ", ".join(f"{name} {percent:+.2f} %" for name, percent in self.differences.items())
            figures.append(f"from the planner's {off}")
        verdict = f"problems: {len(self.problems)}" if self.problems else "ok"
        return f"{self.role} {self.rank} of {self.world}: {'; '.join([*figures, verdict])}"


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
        return next((rank.versions for rank in self.ranks if rank.versions), {})

    @property
    def verdict(self) -> str:
        bad = [rank for rank in self.ranks if rank.problems]
        by = f"vllm-ascend {self.versions.get('vllm-ascend', '?')}"
        count = f"{len(self.ranks)} rank" + ("" if len(self.ranks) == 1 else "s")
        if bad:
            return f"{len(bad)} of {count} of {self.profile} cannot serve this with {by}"
        return f"ok: {count} of {self.profile} built and loaded by {by}; nothing was computed"

    def lines(self) -> Iterator[str]:
        """The report for a terminal: each rank, each problem once with its ranks, the verdict."""
        problems: dict[str, list[str]] = {}
        for rank in self.ranks:
            yield rank.line
            for problem in rank.problems:
                problems.setdefault(problem, []).append(f"{rank.role} {rank.rank}")
        yield from (f"problem: {problem} ({', '.join(ranks)})" for problem, ranks in problems.items())
        yield self.verdict

    def to_dict(self) -> dict[str, Any]:
        ranks = [rank.model_dump(exclude={"versions"}) for rank in self.ranks]
        about = {"profile": self.profile, "checkpoint": self.checkpoint, "versions": self.versions}
        return json_frame("rehearse", self.exit_code) | {"verdict": self.verdict, **about, "ranks": ranks}
