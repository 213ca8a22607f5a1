"""What a rank's rehearsal found, read from its JSON, and what it comes to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from glm5_ascend.errors import EXIT_CHECK_FAILED, EXIT_OK, CheckFailedError, shortened
from glm5_ascend.files.untrusted import read_json_object

#: A planner's number is said to be off from here on, in per cent.
TOLERANCE = 0.1
_MEANING = {
    "uninitialised": "never written by the loader",
    "twice": "written twice",
    "wrong shape": "of a wrong shape",
    "wrong type": "cast between integers and floats",
}


class _Found(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class FoundLines(_Found):
    """The first lines of a list, and how many it has."""

    count: int
    first: list[str]


class FoundFailure(_Found):
    """The stage that raised, and at which tensor of the checkpoint."""

    stage: str
    error: str
    tensor: str = ""
    trace: str = ""


class FoundModel(_Found):
    """Target or draft. Bytes: as built; after post-processing, parameters alone and everything alive."""

    parameters: int
    built_bytes: int
    schemes: dict[str, int]
    problems: dict[str, FoundLines] = {}
    left_at_default: FoundLines | None = None
    parameter_bytes: int | None = None
    resident_bytes: int | None = None


class FoundCache(_Found):
    """blocks: what vLLM makes of `available_bytes`; refused: what it says if that is too little.

    ignored: int8 caches that were asked for and that no layer has.
    """

    layers: int
    bytes_per_token: float
    tokens_per_block: int
    available_bytes: int | None = None
    blocks: int | None = None
    refused: str = ""
    ignored: list[str] = []


class FoundWalk(_Found):
    """operators: lines with shapes, once each; order: their numbers, call by call; ours: answered by no Meta kernel."""

    operators: list[str]
    order: list[int]
    ours: list[str]


class FoundRank(_Found):
    """The answer of `inside/rank.py`."""

    versions: dict[str, str] = {}
    seconds: dict[str, float]
    models: dict[str, FoundModel]
    failure: FoundFailure | None
    unused: FoundLines | None = None
    parameter_bytes: int | None = None
    resident_bytes: int | None = None
    cache: FoundCache | None = None
    walk: dict[str, FoundWalk] = {}
    peak_bytes: int


@dataclass(frozen=True)
class PlannedRank:
    """What the planner says of a rank's die, in bytes; `room` is for weights and caches together."""

    parameter_bytes: int
    bytes_per_token: float
    room: int


@dataclass(frozen=True)
class RehearsedRank:
    """One rank of one role. layout: what is wrong with the sizes of its world, whatever this rank met."""

    role: str
    rank: int
    world: int
    found: FoundRank
    planned: PlannedRank | None = None
    layout: str = ""

    @property
    def problems(self) -> list[str]:
        """What would keep it from serving right, one line each."""
        return list(self._problems())

    def _problems(self) -> Iterator[str]:
        if self.layout:
            yield self.layout
        for name, model in self.found.models.items():
            for kind, lines in model.problems.items():
                yield f"{name}: {lines.count} {_MEANING.get(kind, kind)}: {shortened(lines.first[0], 200)}"
        if failure := self.found.failure:
            at = f" at {failure.tensor}" if failure.tensor else ""
            yield f"{failure.stage}{at}: {shortened(failure.error, 600)}"
        if self.found.unused is not None and self.found.unused.count:
            unused = self.found.unused
            yield f"{unused.count} tensors of the checkpoint are used by nothing: {unused.first[0]}"
        if self.found.cache is not None and self.found.cache.refused:
            yield f"cache: {shortened(self.found.cache.refused, 300)}"
        for part in () if self.found.cache is None else self.found.cache.ignored:
            yield f"cache: int8 {part} are asked for, no layer has them: this version reads other switches or marks"

    @property
    def differences(self) -> dict[str, float]:
        """Official over planned, in per cent, where both are known."""
        if self.planned is None:
            return {}
        pairs = {"parameters": (self.found.parameter_bytes, self.planned.parameter_bytes)}
        if self.found.cache is not None:
            pairs["cache"] = (self.found.cache.bytes_per_token, self.planned.bytes_per_token)  # type: ignore[assignment]
        return {name: 100 * (real / planned - 1) for name, (real, planned) in pairs.items() if real and planned}

    @property
    def cached_tokens(self) -> int | None:
        """Of this rank's group, by vLLM's own number of blocks."""
        cache = self.found.cache
        return None if cache is None or cache.blocks is None else cache.blocks * cache.tokens_per_block


@dataclass(frozen=True)
class Rehearsal:
    """All ranks that were rehearsed. against: what differs from another rehearsal, None if there is no other."""

    profile: str
    checkpoint: str
    ranks: tuple[RehearsedRank, ...]
    against: tuple[str, ...] | None = None

    @property
    def exit_code(self) -> int:
        return EXIT_CHECK_FAILED if any(rank.problems for rank in self.ranks) else EXIT_OK

    @property
    def versions(self) -> dict[str, str]:
        return next((rank.found.versions for rank in self.ranks if rank.found.versions), {})

    @property
    def verdict(self) -> str:
        """One line."""
        bad = [rank for rank in self.ranks if rank.problems]
        by = f"vllm-ascend {self.versions.get('vllm-ascend', '?')}"
        count = f"{len(self.ranks)} rank" + ("" if len(self.ranks) == 1 else "s")
        if bad:
            return f"{len(bad)} of {count} of {self.profile} cannot serve this with {by}"
        return f"ok: {count} of {self.profile} built, loaded, weighed and walked by {by}; nothing was computed"

    def to_dict(self) -> dict[str, Any]:
        """The data of `--json`."""
        return {
            "schema_version": 1, "command": "rehearse", "ok": self.exit_code == EXIT_OK, "exit_code": self.exit_code,
            "verdict": self.verdict, "profile": self.profile, "checkpoint": self.checkpoint, "versions": self.versions,
            "against": self.against,
            "ranks": [
                {
                    "role": rank.role, "rank": rank.rank, "world": rank.world, "problems": rank.problems,
                    "planned": asdict(rank.planned) if rank.planned else None, "differences": rank.differences,
                    "cached_tokens": rank.cached_tokens, "found": rank.found.model_dump(),
                }
                for rank in self.ranks
            ],
        }  # fmt: skip


def read_rank(path: Path) -> FoundRank:
    """The JSON of one rank.

    Raises:
        CheckFailedError: it is not what `inside/rank.py` writes.
    """
    again = "prepare the environment again"
    data = read_json_object(path, error=CheckFailedError, fix=again)
    try:
        return FoundRank.model_validate(data)
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise CheckFailedError(f"{path.name}: {where}: not what a rehearsal writes", again) from None
