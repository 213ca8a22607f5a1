"""Differences between two rehearsals, of two versions or two profiles, in the operators that steps call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from glm5_ascend.deploy.rehearsal.result import RehearsedRank, WalkReport
from glm5_ascend.errors import ConfigError
from glm5_ascend.files.untrusted import read_json_object


class _Walked(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)
    walk: dict[str, WalkReport]


class _OtherRank(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)
    role: str
    rank: int
    report: _Walked


class OtherRehearsal(BaseModel):
    """An earlier output of `rehearse --json`."""

    model_config = ConfigDict(extra="ignore", frozen=True)
    ranks: list[_OtherRank]


def read_other(path: Path) -> OtherRehearsal:
    """Read an output of `rehearse --json`. Raises `ConfigError` for another file."""
    fix = "give the output of `glm5-ascend rehearse ... --json`"
    data = read_json_object(path, error=ConfigError, fix=fix)
    try:
        return OtherRehearsal.model_validate(data)
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise ConfigError(f"{path}: {where}: not a rehearsal", fix) from None


def differences(here: Sequence[RehearsedRank], there: OtherRehearsal) -> Iterator[str]:
    """Yield a line for every operator whose number of calls differs. Ranks are compared in order."""
    for ours, theirs in zip(here, there.ranks, strict=False):
        rank = f"{ours.role} {ours.rank}"
        for step in dict.fromkeys([*ours.report.walk, *theirs.report.walk]):
            calls, other = (counts(walks.get(step)) for walks in (ours.report.walk, theirs.report.walk))
            for line in dict.fromkeys([*other, *calls]):
                if calls[line] != other[line]:
                    yield f"{rank}, {step}: {other[line]} -> {calls[line]} x {line}"


def counts(walk: WalkReport | None) -> Counter[str]:
    return Counter() if walk is None else Counter(walk.operators[number] for number in walk.order)
